"""Loads: all ranks agree on one checkpoint and read it into their tensors."""
