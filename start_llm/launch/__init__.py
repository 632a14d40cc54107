"""Coding clients for this server: what each is told, in environment and files of its own, and its start."""
