"""Writes tool calls in a model's notation, and grammars of that notation."""
