"""The offline API: generation, translation, transcription and synthesis in the process of the caller."""
