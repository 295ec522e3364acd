"""The command line. `main.py` finds the module of a command, which defines the command's options and runs it."""
