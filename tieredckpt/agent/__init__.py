"""The node agent: one daemon per host, user and runtime folder."""
