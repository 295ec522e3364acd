"""Decoder models: one network, and what each family sets of it."""
