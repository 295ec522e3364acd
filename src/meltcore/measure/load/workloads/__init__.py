"""What the load generator sends, and how it reads the answers of each task."""
