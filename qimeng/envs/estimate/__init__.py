"""The judge on a machine without the GPU: kernels interpreted and compiled, times from a model."""
