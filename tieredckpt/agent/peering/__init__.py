"""Keeps manifests and attempts alike on all hosts, and evicts from memory."""
