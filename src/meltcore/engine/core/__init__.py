"""The generation engine: requests, scheduling, KV-cache pages and recurrent states. One engine per replica."""
