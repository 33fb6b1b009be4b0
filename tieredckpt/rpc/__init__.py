"""How trainers and hosts talk to agents: HTTP, descriptors, proofs of who asks."""
