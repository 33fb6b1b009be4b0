"""Tracks what must not be deleted, and decides for all hosts what is shed."""
