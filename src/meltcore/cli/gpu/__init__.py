"""Commands on the GPUs of a node."""
