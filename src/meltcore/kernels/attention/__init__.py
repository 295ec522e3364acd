"""Attention over a paged key-value cache: of one new token of many sequences, and of chunks of prompts."""
