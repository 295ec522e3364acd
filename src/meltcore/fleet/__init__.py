"""The processes of a server: the supervisor, and servers in the background."""
