"""Measures tieredckpt against the limits of the machine it runs on: ``python -m benchmarks``."""
