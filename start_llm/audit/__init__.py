"""Audit a model without its weights: `python -m start_llm audit FOLDER`."""
