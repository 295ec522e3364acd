"""Plans the memory of engines: what a model needs, what is allocated, and the workspaces of libraries."""
