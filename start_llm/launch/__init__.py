"""Configure coding clients for this server, with private environment variables and files, and start them."""
