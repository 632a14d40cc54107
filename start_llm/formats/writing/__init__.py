"""Writers of calls: their text, and the grammar of that text."""
