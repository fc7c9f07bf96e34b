"""The three roles (planner, coder, evaluator) and the typed requests and results that pass between them.

Deals in plain data. Knows nothing about how a kernel is written, checked, timed or chosen.
"""

from qimeng.interfaces.evaluator import EngineReport, Evaluator, ReferenceFacts, SerialEvaluator, Ticket
from qimeng.interfaces.faults import ASKED_AGAIN, FAULTS, LASTING, Fault
from qimeng.interfaces.requests import Asked, EvaluationRequest, FinalOptions
from qimeng.interfaces.results import Accuracy, Evaluation, Gate, Resources, Scope, Timing
from qimeng.interfaces.roles import Coder, Memory, Planner, Prints, Reprints
from qimeng.interfaces.steps import Action, Observation, Patch, Request, Step

__all__ = [
    "ASKED_AGAIN",
    "FAULTS",
    "LASTING",
    "Accuracy",
    "Action",
    "Asked",
    "Coder",
    "EngineReport",
    "Evaluation",
    "EvaluationRequest",
    "Evaluator",
    "Fault",
    "FinalOptions",
    "Gate",
    "Memory",
    "Observation",
    "Patch",
    "Planner",
    "ReferenceFacts",
    "Prints",
    "Reprints",
    "Request",
    "Resources",
    "Scope",
    "SerialEvaluator",
    "Step",
    "Ticket",
    "Timing",
]
