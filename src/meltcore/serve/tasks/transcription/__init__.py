"""Transcription: its routes and forms, and the backend of its engines."""
