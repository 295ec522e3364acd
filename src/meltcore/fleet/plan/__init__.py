"""Plans a fleet: what each engine needs, which GPUs exist, and which engine runs on which GPU."""
