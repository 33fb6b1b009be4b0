"""Replicates checkpoints into other hosts' memory, and repairs lost copies."""
