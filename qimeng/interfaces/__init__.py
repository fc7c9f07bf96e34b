"""The three roles (planner, coder, evaluator) and the typed results that pass between them.

Deals in plain data. Knows nothing about how a kernel is written, checked, timed or chosen.
"""

from qimeng.interfaces.results import LASTING, Accuracy, Evaluation, Gate, Resources, Timing
from qimeng.interfaces.roles import Coder, Evaluator, Memory, Planner
from qimeng.interfaces.steps import Action, Observation, Patch, Request, Step

__all__ = [
    "LASTING",
    "Accuracy",
    "Action",
    "Coder",
    "Evaluation",
    "Evaluator",
    "Gate",
    "Memory",
    "Observation",
    "Patch",
    "Planner",
    "Request",
    "Resources",
    "Step",
    "Timing",
]
