"""Saves whose ranks meet in the agents, not in collectives."""
