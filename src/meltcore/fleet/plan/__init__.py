"""The plan of a fleet: what engines need, which GPUs there are, and which engine goes where."""
