"""What one host decides for all of a namespace: what goes, and what stays."""
