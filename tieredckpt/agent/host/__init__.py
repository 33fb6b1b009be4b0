"""Runs the agent as a process: runtime folder, sockets, sessions."""
