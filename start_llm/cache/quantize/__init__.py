"""Quantise the KV of pages at rest, and restore it."""
