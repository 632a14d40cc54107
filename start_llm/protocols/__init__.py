"""API protocols: convert JSON bodies to requests, and events to JSON."""
