"""The memory tier: slots in tmpfs, the pool of them, and their mappings."""
