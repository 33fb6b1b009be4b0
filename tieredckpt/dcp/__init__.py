"""Implements DCP's storage writer and reader on top of the agent."""
