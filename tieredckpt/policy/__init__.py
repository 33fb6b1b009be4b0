"""Decides without I/O: history, schedule, placement, replication, retention."""
