"""Reports of all measurements: one model of pages, rendered as HTML and on the console."""
