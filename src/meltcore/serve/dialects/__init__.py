"""Routes of other APIs: dwani.ai's."""
