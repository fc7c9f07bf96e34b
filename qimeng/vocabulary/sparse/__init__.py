"""Weights with zeros: the forms that a spec may declare, the action that reads their blocks, the kernels.

Importing it registers all of that. `qimeng.plugins.SHIPPED` names it.
"""

from qimeng.actions import register
from qimeng.family import register_family
from qimeng.spec.declared import register_weights
from qimeng.vocabulary.sparse.detect import detected
from qimeng.vocabulary.sparse.family import SparseProducts
from qimeng.vocabulary.sparse.forms import bsr, csr
from qimeng.vocabulary.sparse.masked_family import Masked
from qimeng.vocabulary.sparse.pairs import pairs
from qimeng.vocabulary.sparse.sampled_family import Sampled
from qimeng.vocabulary.sparse.sparsify import Sparsify
from qimeng.vocabulary.sparse.storage import StorageForm


def _enter() -> None:
    register_weights("bsr", bsr, "bsr:32:10")
    register_weights("csr", csr, "csr:5")
    register_weights("2", pairs, "2:4")
    register(Sparsify())
    register_family(SparseProducts())
    register(StorageForm())
    register_family(Masked())
    register_family(Sampled())


_enter()

__all__ = ["detected"]
