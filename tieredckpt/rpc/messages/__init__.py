"""Defines every request and reply as a plain value."""
