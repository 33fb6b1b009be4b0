"""Copies checkpoints to the tiers below memory, and deletes them there."""
