"""GGUF files: header, formats, tokens, and the configuration that they hold."""
