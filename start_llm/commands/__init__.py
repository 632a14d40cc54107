"""Commands about the installation and the running server: status, stop, service, completion, upgrade."""
