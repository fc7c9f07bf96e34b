"""Faster GPU kernels for PyTorch programs: a planner chooses the optimization, a coder writes it, a judge verifies it.

>>> from qimeng import plan_and_code
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qimeng.version import VERSION as __version__  # noqa: N811  what Python calls it

if TYPE_CHECKING:
    from qimeng.api import plan_and_code
    from qimeng.device import DEVICES, Device
    from qimeng.envs.steps.describe import spec_from_text
    from qimeng.envs.steps.result import Result
    from qimeng.envs.steps.state import Progress
    from qimeng.errors import (
        CoderError,
        DeviceError,
        IllegalAction,
        QimengError,
        ReplayError,
        SpecError,
        StoreError,
    )
    from qimeng.interfaces import Action, Coder, Evaluation, Evaluator, Observation, Patch, Planner, Request
    from qimeng.program.program import Program
    from qimeng.recipe import Recipe
    from qimeng.spec import KernelSpec
    from qimeng.store import Store

_HOME = {
    "Action": "qimeng.interfaces",
    "Coder": "qimeng.interfaces",
    "CoderError": "qimeng.errors",
    "DEVICES": "qimeng.device",
    "Device": "qimeng.device",
    "DeviceError": "qimeng.errors",
    "Evaluation": "qimeng.interfaces",
    "Evaluator": "qimeng.interfaces",
    "IllegalAction": "qimeng.errors",
    "KernelSpec": "qimeng.spec",
    "Observation": "qimeng.interfaces",
    "Patch": "qimeng.interfaces",
    "Planner": "qimeng.interfaces",
    "Program": "qimeng.program.program",
    "Progress": "qimeng.envs.steps.state",
    "QimengError": "qimeng.errors",
    "Recipe": "qimeng.recipe",
    "ReplayError": "qimeng.errors",
    "Request": "qimeng.interfaces",
    "Result": "qimeng.envs.steps.result",
    "SpecError": "qimeng.errors",
    "Store": "qimeng.store",
    "StoreError": "qimeng.errors",
    "optimize": "qimeng.integration",
    "plan_and_code": "qimeng.api",
    "spec_from_text": "qimeng.envs.steps.describe",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used, so that importing the package is quick."""
    if name not in _HOME:
        raise AttributeError(f"module 'qimeng' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "Action",
    "Coder",
    "CoderError",
    "DEVICES",
    "Device",
    "DeviceError",
    "Evaluation",
    "Evaluator",
    "IllegalAction",
    "KernelSpec",
    "Observation",
    "Patch",
    "Planner",
    "Program",
    "Progress",
    "QimengError",
    "Recipe",
    "ReplayError",
    "Request",
    "Result",
    "SpecError",
    "Store",
    "StoreError",
    "__version__",
    "optimize",
    "plan_and_code",
    "spec_from_text",
]
