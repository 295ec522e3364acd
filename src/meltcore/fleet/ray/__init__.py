"""Runs engines and commands in Ray clusters. Only this package imports ray, in a driver process of its own."""
