"""Implements the tieredckpt command, one module per command group."""
