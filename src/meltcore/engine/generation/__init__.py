"""The generation engine, and the same behind two pipes."""
