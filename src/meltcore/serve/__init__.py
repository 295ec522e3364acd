"""The server: the HTTP API over one or several models, its API server processes, and the servers it calls. No torch."""
