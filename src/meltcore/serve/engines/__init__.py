"""Engines in processes of their own: how they are started, connected and watched."""
