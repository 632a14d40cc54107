"""The text forms of models: a file for each model format, a registry, and what reads and writes calls."""
