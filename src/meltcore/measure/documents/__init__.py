"""Defines the documents of results: their schema, and run folders."""
