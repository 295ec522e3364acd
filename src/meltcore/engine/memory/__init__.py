"""Memory of engines: plans, what a model needs, workspaces."""
