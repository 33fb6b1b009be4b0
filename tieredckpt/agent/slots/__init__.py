"""Slots of shared memory: who gets which, and which hold other hosts' copies."""
