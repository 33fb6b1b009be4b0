"""Keeps the catalog of a tier that several hosts write and delete in."""
