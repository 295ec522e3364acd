"""Prepares the text of speech synthesis: the characters of a checkpoint, and the chunks to speak. It needs no torch."""
