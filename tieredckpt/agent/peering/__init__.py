"""What hosts tell each other of checkpoints, and what memory keeps of them."""
