"""Loads and measures any OpenAI-compatible server: `runner.run_levels(LoadConfig(url=...))`."""
