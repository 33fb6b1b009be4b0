"""Chooses what to restore from which copies, and fetches it verified."""
