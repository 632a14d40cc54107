"""Counters, terminal output and traces."""
