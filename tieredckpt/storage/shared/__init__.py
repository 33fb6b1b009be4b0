"""The catalog of a tier that several hosts write to and delete from."""
