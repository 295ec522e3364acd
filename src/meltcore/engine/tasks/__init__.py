"""Runs tasks other than text generation in one engine: transcription, translation, synthesis and embedding."""
