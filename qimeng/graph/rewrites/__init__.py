"""Rewrites of a graph by algebra: one rule, one file.

A rule computes the same over real numbers with less work. See `qimeng.graph.rewrites.base.Rule`.
"""

from qimeng.graph.rewrites.base import Edit, NoRewrite, Rewrite, Rule
from qimeng.graph.rewrites.registry import RULES, find_rewrites, options, rewritten_graph

__all__ = ["Edit", "NoRewrite", "RULES", "Rewrite", "Rule", "find_rewrites", "options", "rewritten_graph"]
