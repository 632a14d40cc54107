"""Run a LiteLLM proxy in front of the server: configuration, process, access, routing and forwarding."""
