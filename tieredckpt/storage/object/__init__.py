"""Tiers in object stores. Clients of stores are imported here, when used."""
