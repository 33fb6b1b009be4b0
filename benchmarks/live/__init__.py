"""Benchmarks of live recovery: trainings whose ranks are killed, with and without it."""
