"""Saves: each rank writes a segment, rank 0 commits, failures are resolved."""
