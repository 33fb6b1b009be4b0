"""How trainers talk to the node agent."""
