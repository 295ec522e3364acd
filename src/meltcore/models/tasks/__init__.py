"""Networks of translation, transcription, synthesis, embeddings and reranking."""
