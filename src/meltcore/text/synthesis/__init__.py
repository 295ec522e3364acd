"""Text of speech synthesis: the characters of a checkpoint, and the chunks that a text is spoken in. No torch."""
