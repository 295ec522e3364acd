"""The processes that the supervisor starts, watches and ends: engines here and on nodes, and other servers."""
