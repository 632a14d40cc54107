"""Readers of calls: state machines without I/O that several formats share."""
