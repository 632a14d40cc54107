"""Records the tokens that were computed for each conversation. See docs/ARCHITECTURE.md."""
