"""Serves embeddings, reranking and scores: their routes, and the backend of their engines."""
