"""Evaluates any server: arithmetic problems, GSM8K, API conformance, throughput with checked answers, the score."""
