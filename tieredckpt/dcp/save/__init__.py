"""Saving: DCP's storage writer, the commit, and what is done when one fails."""
