"""Networks of translation, transcription and synthesis."""
