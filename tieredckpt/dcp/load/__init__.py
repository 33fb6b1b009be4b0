"""Loading: all ranks choose one checkpoint, and read it into their tensors."""
