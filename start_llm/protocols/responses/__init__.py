"""OpenAI's Responses protocol and its store."""
