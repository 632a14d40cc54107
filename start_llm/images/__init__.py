"""Takes in the images of requests: decodes their text, fetches their addresses, checks what they are."""
