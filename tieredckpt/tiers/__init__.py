"""Places for immutable bytes by key, and the slots of the memory tier."""
