"""Encodes and decodes segments, plans, manifests and records, without I/O."""
