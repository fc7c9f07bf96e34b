"""The judge, the step loop, and the Gymnasium environment.

Importing this loads neither gymnasium nor torch, which a judge on a GPU machine may lack or not need. The environment
`qimeng/KernelOptimization-v1` is registered where gymnasium is loaded already, where `qimeng.envs.gym.environment` is
imported (as ``gymnasium.make("qimeng.envs.gym.environment:qimeng/KernelOptimization-v1", tasks=…)`` does), and by
`register_environment`.
"""

from __future__ import annotations

import sys

ENVIRONMENT = "qimeng/KernelOptimization-v1"


def register_environment() -> None:
    """Make `gymnasium.make(ENVIRONMENT, tasks=…)` work; calling it again does nothing."""
    import gymnasium

    if ENVIRONMENT not in gymnasium.registry:
        gymnasium.register(ENVIRONMENT, entry_point="qimeng.envs.gym.environment:KernelOptimizationEnv")


if "gymnasium" in sys.modules:
    register_environment()

__all__ = ["ENVIRONMENT", "register_environment"]
