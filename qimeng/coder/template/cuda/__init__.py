"""Kernels printed as CUDA C++."""
