"""Engines in processes of their own: how they are started, reached and watched."""
