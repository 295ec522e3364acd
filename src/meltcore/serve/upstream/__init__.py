"""Other servers that answer requests: forwarding, connections, retries, health, and processes that Meltcore starts."""
