"""Decodes uploaded audio and encodes speech in worker processes, without torch."""
