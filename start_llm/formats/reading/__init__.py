"""Parsers of tool calls, shared by several formats: state machines without I/O."""
