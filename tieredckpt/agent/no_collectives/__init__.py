"""Commits saves whose ranks meet in agents, not in collectives."""
