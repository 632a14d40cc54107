"""Prompt cache: keep the KV of computed prompts, and restore it for exactly the same tokens."""
