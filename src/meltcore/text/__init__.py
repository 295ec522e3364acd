"""Converts between text and token ids: tokenizer, chat template, detokenizer, reasoning and stop strings."""
