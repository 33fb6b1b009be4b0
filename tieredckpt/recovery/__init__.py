"""Deciding what to restore from where, and fetching it, verified."""
