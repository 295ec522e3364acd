"""`meltcore tune`: finds the limits and the best settings of a server by restarting it with different settings."""
