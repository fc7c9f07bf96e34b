"""The judge, the step loop, and the Gymnasium environment.

Importing this loads neither gymnasium nor torch. The environment `qimeng/KernelOptimization-v0` is registered where
gymnasium is loaded already (as in ``gymnasium.make("qimeng.envs:qimeng/KernelOptimization-v0")``), and by
`register_environment`.
"""

from __future__ import annotations

import sys

ENVIRONMENT = "qimeng/KernelOptimization-v0"


def register_environment() -> None:
    """Make `gymnasium.make(ENVIRONMENT, tasks=…)` work; calling it again does nothing."""
    import gymnasium

    if ENVIRONMENT not in gymnasium.registry:
        gymnasium.register(ENVIRONMENT, entry_point="qimeng.envs.environment:KernelOptimizationEnv")


if "gymnasium" in sys.modules:
    register_environment()

__all__ = ["ENVIRONMENT", "register_environment"]
