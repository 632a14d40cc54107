"""Model text formats: one file per format, a registry, and the code that parses and writes tool calls."""
