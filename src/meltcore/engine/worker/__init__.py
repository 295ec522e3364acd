"""The device side of a generation engine: model runner, CUDA graphs, sampler, loading and warm-up."""
