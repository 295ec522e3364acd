"""HTTP itself: connections, requests and responses, forms, checks before the routes, and the page at /."""
