"""Expressions of a loop nest as CUDA C++."""
