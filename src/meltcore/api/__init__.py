"""The HTTP API over one or several models: routes, request forms, streaming, admission, metrics. No torch."""
