"""Places for immutable bytes by key, and the catalog of checkpoints in one."""
