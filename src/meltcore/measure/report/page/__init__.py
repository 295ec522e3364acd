"""Pages, their charts, and the same on the console."""
