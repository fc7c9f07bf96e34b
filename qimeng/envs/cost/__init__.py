"""Models of time and memory: what PyTorch, a kernel, or a reference should take."""
