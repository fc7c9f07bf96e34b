"""What PyTorch itself offers for a large computation, tried before a search begins.

A search may use up its budget on a network before it finds anything. One launch of all of eager's kernels, and then
TorchInductor's code launched so, take two evaluations. They are steps on a branch: the search begins where it would
have begun, and the best of them is returned where it finds nothing better. Knows nothing about how either is written.
"""

from __future__ import annotations

from qimeng.actions import check_action
from qimeng.actions.large import is_large
from qimeng.envs.steps.session import Session
from qimeng.errors import IllegalAction
from qimeng.interfaces import Action
from qimeng.program.launch import CUDA_GRAPH

STEPS = (Action("launch", (), CUDA_GRAPH), Action("library", (), "inductor"))
"""In this order, so that the second is judged once, as one launch; where the first is refused, by itself."""


def compiled_first(session: Session) -> None:
    """Take `STEPS` on a branch of `session`, where its computation is large and times are measured.

    Args:
        session: at its start, whose program was judged.
    """
    task, start = session.task, session.begin()
    if not is_large(task.start) or start.timing is None or start.timing.estimated:
        return
    branch = session.fork()
    for action in STEPS:
        if branch.exhausted() is not None:
            return
        try:
            check_action(branch.state.program, action, task.context)
        except IllegalAction:
            continue
        branch.step(action)


__all__ = ["STEPS", "compiled_first"]
