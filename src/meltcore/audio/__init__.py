"""Audio without torch: decoding of uploads and encoding of speech, in worker processes."""
