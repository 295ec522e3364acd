"""The command line: `main.py` finds the command. Each module has the options of a command and runs it."""
