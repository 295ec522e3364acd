"""Provides the offline API: generation, translation, transcription and synthesis in the caller's process."""
