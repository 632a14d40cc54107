"""Run a LiteLLM proxy before the server: configuration, child process, access policy."""
