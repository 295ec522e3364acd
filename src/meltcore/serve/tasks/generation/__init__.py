"""Generation: its routes, prompts, responses, and the backend of its engines."""
