"""A request between HTTP and an engine: its fields, context and queue, and what is counted and logged for it."""
