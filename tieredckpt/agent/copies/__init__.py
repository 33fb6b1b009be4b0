"""Copies in other hosts' memory: who is to hold which, and how they come there."""
