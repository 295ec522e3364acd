"""Audio without torch: decoding and cutting of uploads, in worker processes."""
