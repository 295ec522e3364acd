"""The server: the HTTP API over one or several models, its API server processes, and what it talks to. No torch."""
