"""Implements tiers in object stores and in file systems that fsspec supports.

The clients of stores are imported when they are used.
"""
