"""Model families, their configurations and the loader of their checkpoints."""
