"""`meltcore tune`: finds the limits and the good settings of a server by restarting it with one after another."""
