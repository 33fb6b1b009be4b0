"""Adapters for training frameworks, one module for each; importing one imports its framework."""
