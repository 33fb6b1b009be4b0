"""Stores immutable bytes by key, and catalogs the checkpoints of a tier."""
