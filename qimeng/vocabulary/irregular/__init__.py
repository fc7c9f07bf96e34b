"""Irregular computations: gathers, reductions by segment, products with chosen matrices, sorts, writes; kernels.

Importing it registers all of that. `qimeng.plugins.SHIPPED` names it.
"""

from qimeng.actions import register
from qimeng.family import register_family
from qimeng.vocabulary.irregular.family import Irregular
from qimeng.vocabulary.irregular.grouped_family import GroupedProducts
from qimeng.vocabulary.irregular.kinds import Aggregate, IrregularForm
from qimeng.vocabulary.irregular.route import Dispatch, Route
from qimeng.vocabulary.irregular.routed_family import RoutedExperts
from qimeng.vocabulary.irregular.sort_family import Sort
from qimeng.vocabulary.irregular.write_family import Writes


def _enter() -> None:
    for kind in (Aggregate(), IrregularForm(), Route(), Dispatch()):
        register(kind)
    register_family(Irregular())
    register_family(GroupedProducts())
    register_family(RoutedExperts())
    register_family(Sort())
    register_family(Writes())


_enter()

__all__: list[str] = []
