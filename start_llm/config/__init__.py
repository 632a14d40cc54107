"""Settings: the table of variables, the parsers of their values, and the documents made from the table."""
