"""The tieredckpt command, one module per command group."""
