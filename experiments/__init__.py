"""Research that uses the library: measurements of the judge, comparisons of planners, a model that writes kernels.

Nothing here is part of the installed package, and nothing in `qimeng/` imports it. The commands are in `benchmarks/`.
"""
