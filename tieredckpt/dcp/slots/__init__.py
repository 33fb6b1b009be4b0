"""Maps slots into the trainer, and copies tensors into them."""
