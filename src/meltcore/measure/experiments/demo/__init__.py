"""`meltcore demo` end to end: serve a model, check it, load it level by level, report."""
