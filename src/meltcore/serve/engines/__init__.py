"""Connects API server processes to engines, which run in processes of their own."""
