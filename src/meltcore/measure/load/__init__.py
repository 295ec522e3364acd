"""The load generator: `runner.run_levels(LoadConfig(url=...))` loads any OpenAI-compatible server and measures it."""
