"""The translation engine and its device loop: beam search."""
