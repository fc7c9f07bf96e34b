"""Irregular computations: gathers, reductions by segment, messages between nodes; actions and kernels.

Importing it registers all of that. `qimeng.plugins.SHIPPED` names it.
"""

from qimeng.actions import register
from qimeng.family import register_family
from qimeng.vocabulary.irregular.family import Irregular
from qimeng.vocabulary.irregular.kinds import Aggregate, IrregularForm


def _enter() -> None:
    register(Aggregate())
    register(IrregularForm())
    register_family(Irregular())


_enter()

__all__: list[str] = []
