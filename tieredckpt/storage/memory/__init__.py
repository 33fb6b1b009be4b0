"""Implements the memory tier: slots in tmpfs, their pool, their mappings."""
