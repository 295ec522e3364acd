"""Commands on a fleet."""
