"""Configuration: what may stand in the YAML file, and what it means. Decides nothing."""
