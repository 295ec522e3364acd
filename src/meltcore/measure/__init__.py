"""Everything that measures: load, experiments, the GPU score, nodes, traces, documents and reports."""
