"""The table from ATen operators to loop nests, whole.

Deals in which files hold rules. Knows nothing about what any of them says.
"""

from qimeng.coder.template.rules import (
    activations,
    attention,
    convolution,
    functions,
    gammas,
    pointwise,
    powers,
    products,
    reductions,
    resized,
    sampling,
    scans,
    scatters,
    shapes,
    views,
    windows,
)
from qimeng.coder.template.rules.base import RULES

FILES = (
    activations,
    attention,
    convolution,
    functions,
    gammas,
    pointwise,
    powers,
    products,
    reductions,
    resized,
    sampling,
    scans,
    scatters,
    shapes,
    views,
    windows,
)
"""Importing each of them enters its rules."""

__all__ = ["FILES", "RULES"]
