"""The command line: `main.py` finds the command; each module has a command's options and runs it."""
