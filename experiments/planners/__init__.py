"""Planners and searches compared on trees of specs that no planner was trained on.

`replay` (a planner on a stored tree), `heldout` (which specs are held out), `explore` (their trees), `jobs` (many
replays at once), `bound` (the most that a tree allows), `live` (final programs timed again), `summary`, `picture` and
`training_picture` (tables and drawings).
"""
