"""Finds out, once at load, what a chat template does."""
