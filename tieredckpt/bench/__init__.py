"""Measures saves and recoveries with a user's own state, tiers and ranks.

The command line imports it without torch; :mod:`.__main__` is what each rank runs.
"""
