"""The layers around a process that runs untrusted code; `Sandbox` enters them.

One layer a file: `surroundings` (folder, environment, open files), `network`, `limits`, `privileges`, `landlock`,
`seccomp`.
"""

from qimeng.envs.sandbox.layer import Unavailable
from qimeng.envs.sandbox.sandbox import (
    DEFAULT,
    LAYERS,
    LEVELS,
    Report,
    Sandbox,
    close_sockets,
    entered_here,
    needs_landlock,
)

__all__ = [
    "DEFAULT", "LAYERS", "LEVELS", "Report", "Sandbox", "Unavailable", "close_sockets", "entered_here",
    "needs_landlock",
]  # fmt: skip
