"""Translation: its route, and the backend of its engines."""
