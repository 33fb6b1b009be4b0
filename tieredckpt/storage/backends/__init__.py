"""Opening a tier by its URL, tiers in files, and asking a tier if it works."""
