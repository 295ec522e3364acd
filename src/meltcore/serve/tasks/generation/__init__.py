"""Generation: routes, prompts, responses, and the backend of local engines."""
