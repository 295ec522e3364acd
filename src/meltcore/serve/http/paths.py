"""Lists the paths of the API that need no key."""

SWAGGER_PATHS = ("/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js")
DOCS_PATHS = ("/docs", "/openapi.json", *SWAGGER_PATHS)
# They say what the server is and whether it works, and nothing of its load or of any user.
OPEN_PATHS = frozenset(("/", *DOCS_PATHS, "/health", "/v1/health", "/live"))
