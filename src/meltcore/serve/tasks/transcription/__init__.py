"""Transcription: routes, forms, and the backend of its engines."""
