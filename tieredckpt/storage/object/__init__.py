"""Implements tiers in object stores and in whatever fsspec reaches.

The clients of stores are imported when they are used.
"""
