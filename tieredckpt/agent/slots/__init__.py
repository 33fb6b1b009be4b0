"""Assigns slots of shared memory to sessions and to replicas."""
