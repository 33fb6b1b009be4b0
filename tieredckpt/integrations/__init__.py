"""Adapts training frameworks; each module imports its framework."""
