"""The process shell: the part of an engine process that does not depend on what the engine computes."""
