"""Shared types: requests, events, errors. Imports nothing else of this package."""
