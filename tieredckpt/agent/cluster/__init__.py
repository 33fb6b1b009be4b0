"""Knows the job's hosts, the enforced configuration, and saves in doubt."""
