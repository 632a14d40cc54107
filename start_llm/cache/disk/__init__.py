"""The disk tier of the prompt cache."""
