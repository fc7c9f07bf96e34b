"""How far the judge can be trusted: what it misses, what disturbs it, what it costs, how steady its times are.

Each measurement writes rows of JSON that say where they were made (`experiments.trust.journal`); the command is
`benchmarks/judge.py`, the tables in `experiments.trust.views`.
"""
