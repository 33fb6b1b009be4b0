"""Pure decisions: history, placement, retention, schedule. No I/O."""
