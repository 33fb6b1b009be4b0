"""The trainer's side of slots: the ring, the copying pass, saves in flight."""
