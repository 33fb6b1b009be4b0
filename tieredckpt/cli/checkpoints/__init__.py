"""Implements the commands about checkpoints: list, verify, pin."""
