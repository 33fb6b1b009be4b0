"""Carries requests: HTTP, descriptors, and proofs of who asks."""
