"""The engine of tasks that are not text generation: recognition of speech, translation, synthesis."""
