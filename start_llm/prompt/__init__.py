"""Turns the messages of a request into the tokens that the model reads."""
