"""The core of the generation engine: requests, scheduling, KV-cache pages and recurrent states."""
