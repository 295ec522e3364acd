"""Declares the settings of a server and of a fleet: structs, their YAML, checks, flags and command templates."""
