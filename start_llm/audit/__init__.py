"""What to expect of a model, found without its weights: `python -m start_llm audit FOLDER`."""
