"""The client of the load generator: connections, HTTP and streams."""
