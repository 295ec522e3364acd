"""The processes of a server: the supervisor, the API server processes and their channel."""
