"""How far the judge can be trusted: what it misses, what disturbs it, what it costs, how steady its times are.

Each measurement writes rows of JSON that say where they were made (`qimeng.bench.trust.journal`); the scripts are in
`benchmarks/`, the tables in `qimeng.bench.trust.views`.
"""
