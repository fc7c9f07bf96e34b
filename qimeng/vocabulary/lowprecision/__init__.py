"""Weights stored in few bits: the forms that a spec may declare, the action that reads them, the kernels.

Importing it registers all of that. `qimeng.plugins.SHIPPED` names it.
"""

from qimeng.actions import register
from qimeng.family import register_family
from qimeng.spec.declared import register_weights
from qimeng.vocabulary.lowprecision.dequantize import Dequantize
from qimeng.vocabulary.lowprecision.family import StoredProducts
from qimeng.vocabulary.lowprecision.forms import Fp8, Int8, by_channel, int4


def _enter() -> None:
    for form in (Int8(), Fp8()):
        register_weights(form.text, by_channel(form))
    register_weights("int4", int4)
    register(Dequantize())
    register_family(StoredProducts())


_enter()
