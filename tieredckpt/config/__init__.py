"""Reads and validates the configuration, and decides nothing."""
