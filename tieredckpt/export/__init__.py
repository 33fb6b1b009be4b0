"""Writes checkpoints in formats of other programs, and commits such files."""
