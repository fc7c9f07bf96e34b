"""Why a computation cannot be one graph, in words: what stands in the way, the line of code, and what to do.

Deals in the errors of torch.export, whose classes and messages are not documented, and in nodes of its graphs. Knows
nothing about how a graph is made.
"""

from __future__ import annotations

import re
from typing import Any

from qimeng.spec.own_lines import line_in, line_of

VALUES = "its Python code depends on the values of a tensor"
NUMPY = "it leaves PyTorch, for NumPy or for numbers of a tensor"
INSTEAD = (
    "To have the rest optimized, move that step into a submodule of its own, which then stays as it is; or use a mask "
    "or torch.where; or pass numbers and flags as Python numbers"
)
LOST = (
    "torch.export takes a tensor for a constant that is none, as for gradients inside of forward and some uses of "
    "torch.vmap"
)
STATE_INSTEAD = (
    "To have it optimized, register it in the constructor as a buffer of the size that it has in all calls, which "
    "forward then reads, or call the module once before it is given, or pass the state as an input and return it"
)
RETURNS = "it returns a number, or a tensor of a size, that depends on the values of a tensor"
RETURN_INSTEAD = (
    "To have it optimized, return tensors of fixed size (a mask, or padding), or optimize the part before it"
)

SPARSE = "it makes a sparse tensor inside of forward"
SPARSE_INSTEAD = (
    "To have it optimized, keep the dense weight in a torch.nn.Linear and declare weights='csr:5' or the like, "
    "or keep indices and values as dense tensors and write gathers and reductions (index_add, segment_reduce)"
)
NESTED = "it uses a nested tensor inside of forward"
NESTED_INSTEAD = (
    "To have it optimized, keep values and offsets as dense tensors and write reductions of segments (segment_reduce, "
    "index_add)"
)
MODULE = "it moves a module inside of forward, as one that it makes there"
MODULE_INSTEAD = (
    "To have it optimized, make the module once, outside, and give that one; or call torch.nn.functional with its "
    "weights"
)

_STATE = re.compile(r"(?:Constant (\S+) is mutated|expected compiled_fn to be GraphModule)")
"""The second where a buffer lies in the same memory."""

_VALUES = ("DataDependent", "PendingUnbacked", "UserError")
_NESTED = ("nested_tensor", "NestedTensor", "jagged")
_SPARSE = ("Sparse", "sparse_", "compressed tensor", "layout_impl")
_NUMPY = (".numpy()", "FakeTensor", "is not allocated yet", "data_ptr")


def of_export(error: BaseException) -> str:
    """What torch.export refused, in words.

    Args:
        error: what it raised, with its traceback.
    """
    first, name = (str(error).strip().splitlines() or [""])[0], type(error).__name__
    if any(word in name for word in _VALUES) or "unbacked" in first or "(got SymInt)" in first:
        return f"{VALUES}{line_of(error)}. {INSTEAD}"
    if "DynamicOutputShape" in name:
        return f"the size of what {first.removesuffix('.default')} yields depends on values{line_of(error)}. {INSTEAD}"
    if "in the exported program constant's list" in first:
        return f"{LOST}{line_of(error)}. {INSTEAD}"
    if (found := re.match(r"Found <class '([^']+)'> in output", first)) is not None:
        return (
            f"it returns a {found[1]}. To have it optimized, return tensors and plain values in tuples, lists or dicts"
        )
    if (found := _STATE.match(first)) is not None:
        return of_state(found[1] or "tensors that are no attributes")
    if any(word in first for word in _NESTED):
        return f"{NESTED}{line_of(error)}. {NESTED_INSTEAD}"
    if any(word in first for word in _SPARSE):
        return f"{SPARSE}{line_of(error)}. {SPARSE_INSTEAD}"
    if any(word in first for word in _NUMPY):
        return f"{NUMPY}{line_of(error)}. {INSTEAD}"
    if "Couldn't swap" in first:
        return f"{MODULE}{line_of(error)}. {MODULE_INSTEAD}"
    return f"torch.export: {name}: {first[:300]}{line_of(error)}"


def of_state(name: str) -> str:
    """That calls change what the attribute `name` holds."""
    return f"forward keeps state in {name}. {STATE_INSTEAD}"


def is_of_state(error: BaseException) -> bool:
    """Whether torch.export refused that a call writes into a tensor that it took for a constant."""
    return _STATE.match(str(error).strip()) is not None


def of_result(node: Any) -> str:
    """That a node of an exported graph, which is a result, depends on values."""
    return f"{RETURNS}{line_in(node.meta.get('stack_trace') or '')}. {RETURN_INSTEAD}"


__all__ = [
    "INSTEAD", "LOST", "NUMPY", "RETURNS", "RETURN_INSTEAD", "STATE_INSTEAD", "VALUES",
    "is_of_state", "of_export", "of_result", "of_state",
]  # fmt: skip
