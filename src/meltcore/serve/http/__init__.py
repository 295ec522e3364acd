"""The HTTP layer: connections, requests, responses, forms, checks before the routes, and the page at /."""
