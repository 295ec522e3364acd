"""Decoder models: one network, and the settings of each family."""
