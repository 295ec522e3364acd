"""Pages of nodes: certificate, card, profile, plan."""
