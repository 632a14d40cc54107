"""HTTP server: listener, connection handler, routes, server-sent events."""
