"""The HTTP client of the load generator: connections, responses and streams."""
