"""OpenAI's protocol: chat completions and text completions."""
