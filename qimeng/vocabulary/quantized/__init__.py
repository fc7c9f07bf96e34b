"""Products of activations and weights in 8 bits: the forms that a spec may declare, the action, the kernels.

Importing it registers all of that. `qimeng.plugins.SHIPPED` names it.
"""

from qimeng.actions import register
from qimeng.family import register_family
from qimeng.spec.declared import register_activations
from qimeng.vocabulary.quantized.family import CodedProducts
from qimeng.vocabulary.quantized.forms import fp8, int8
from qimeng.vocabulary.quantized.multiply_codes import MultiplyCodes


def _enter() -> None:
    register_activations("int8", int8)
    register_activations("fp8", fp8)
    register(MultiplyCodes())
    register_family(CodedProducts())


_enter()
