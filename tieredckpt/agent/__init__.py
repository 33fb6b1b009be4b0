"""Runs one daemon per host, which owns the memory tier and answers requests."""
