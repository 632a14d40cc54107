"""What was computed for which conversation. See docs/ARCHITECTURE.md."""
