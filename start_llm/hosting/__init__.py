"""Loaded models: what exists once for each, which are loaded, and what all of them share."""
