"""Numbers of documents in words: formats, percentiles, verdicts over several."""
