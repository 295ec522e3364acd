"""The model of pages, their charts, and their rendering as HTML and on the console."""
