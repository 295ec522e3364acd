"""The server: the HTTP API for all models, its processes, and the upstream servers that it calls.

It never imports torch.
"""
