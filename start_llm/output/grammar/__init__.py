"""From the form that a request demands to a grammar, and from that to the tokens that may come next."""
