"""The generation engine, and a program that serves it over two pipes."""
