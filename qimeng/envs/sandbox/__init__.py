"""Layers around a process in which foreign code runs; `Sandbox` enters them.

One layer a file: `surroundings` (folder, environment, open files), `network`, `limits`, `privileges`, `landlock`,
`seccomp`.
"""

from qimeng.envs.sandbox.layer import Unavailable
from qimeng.envs.sandbox.sandbox import DEFAULT, LAYERS, LEVELS, Report, Sandbox, entered_here

__all__ = ["DEFAULT", "LAYERS", "LEVELS", "Report", "Sandbox", "Unavailable", "entered_here"]
