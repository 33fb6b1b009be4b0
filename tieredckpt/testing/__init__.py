"""Shipped test kit: conformance suites for third-party parts."""
