"""Loads all models of a server together."""
