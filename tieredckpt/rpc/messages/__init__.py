"""What is asked and answered, as plain values."""
