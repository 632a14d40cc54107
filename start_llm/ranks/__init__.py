"""One model over several machines: rank 0 decides, and the others execute its plans (ADR 26)."""
