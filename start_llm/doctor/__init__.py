"""`start_llm doctor`: examine this machine with a model, and say what is wrong."""
