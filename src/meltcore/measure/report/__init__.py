"""Reports of everything that measures: one document model, rendered as HTML and on the console."""
