"""Opens a tier by its URL, stores one in files, and probes one."""
