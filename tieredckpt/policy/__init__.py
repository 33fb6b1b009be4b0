"""Pure decisions: configuration, time line, retention, schedule. No I/O."""
