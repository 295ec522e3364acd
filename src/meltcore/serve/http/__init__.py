"""HTTP itself: connections, requests and responses, forms, what is refused before a route, and the page at /."""
