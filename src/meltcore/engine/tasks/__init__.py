"""The engine of tasks that are not text generation: transcription, translation, synthesis."""
