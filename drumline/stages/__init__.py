"""The work of a pipeline stage: ring, messages, program, CUDA graphs, weights."""
