"""Splits the text that a model writes into reasoning, answer and tool calls. No I/O."""
