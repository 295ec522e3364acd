"""Routes whose forms come from APIs other than OpenAI's. Today this is dwani.ai's API."""
