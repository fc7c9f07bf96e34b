"""Weights stored in few bits: the forms that a spec may declare, the action that reads them, the kernels.

Importing it registers all of that. `qimeng.plugins.SHIPPED` names it.
"""

from qimeng.actions import register
from qimeng.family import register_family
from qimeng.spec.declared import register_weights
from qimeng.vocabulary.lowprecision.dequantize import Dequantize
from qimeng.vocabulary.lowprecision.family import StoredProducts
from qimeng.vocabulary.lowprecision.forms import Int8, by_channel, fp8, int4


def _enter() -> None:
    register_weights("int8", by_channel(Int8()))
    register_weights("fp8", fp8)
    register_weights("int4", int4)
    register(Dequantize())
    register_family(StoredProducts())


_enter()
