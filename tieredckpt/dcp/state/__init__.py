"""Describes a state dict: items, metadata, values, per-rank objects."""
