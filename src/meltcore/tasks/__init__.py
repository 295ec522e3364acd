"""Device loops of tasks whose output is not one token per step of a language model: transcription, translation."""
