"""Bytes to values and back: segment, plan and manifest. No I/O."""
