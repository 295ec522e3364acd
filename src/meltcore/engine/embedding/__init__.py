"""The engine that computes embeddings of texts and scores of pairs."""
