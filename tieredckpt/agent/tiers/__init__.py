"""Copying checkpoints to slower tiers; keeping, scanning and pruning them there."""
