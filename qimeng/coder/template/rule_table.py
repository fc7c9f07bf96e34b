"""The table from ATen operators to loop nests, whole.

Deals in which files hold rules. Knows nothing about what any of them says.
"""

from qimeng.coder.template import (
    rule_activations,
    rule_functions,
    rule_pointwise,
    rule_products,
    rule_reductions,
    rule_views,
)
from qimeng.coder.template.rule_base import RULES

FILES = (rule_activations, rule_functions, rule_pointwise, rule_products, rule_reductions, rule_views)
"""Importing each of them enters its rules."""

__all__ = ["FILES", "RULES"]
