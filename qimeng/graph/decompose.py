"""Decomposes the operators of an exported program, except those that templates and libraries implement whole.

Deals in torch.export's tables of decompositions. Knows nothing about how a program was exported or how it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.export import exported_program
from torch.fx import Graph, Node

from qimeng.graph.decompose_once import DETACHING, NotByKinds, decompose_once
from qimeng.graph.functional import without_writes
from qimeng.graph.own_parts import PARTS

KEPT = (
    "native_layer_norm native_group_norm _softmax _log_softmax logsumexp linalg_vector_norm var_mean gelu silu mish "
    "elu selu celu hardswish hardsigmoid hardtanh leaky_relu softplus relu relu6 sigmoid tanh log_sigmoid_forward "
    "linear addmm baddbmm scaled_dot_product_attention lstm gru rnn_tanh rnn_relu select_scatter "
    "upsample_linear1d upsample_trilinear3d upsample_bicubic2d"
).split()
"""Operators kept whole although PyTorch's default table takes them apart: templates and libraries have them whole."""

WRONG = "multilabel_margin_loss".split()
"""Operators kept whole because PyTorch's table takes them apart into others (here where a row has no target)."""

MADE = "linspace logspace hann_window hamming_window blackman_window bartlett_window kaiser_window".split()
"""Operators that make a tensor from numbers. PyTorch takes them apart into float32 arithmetic, and computes them in the
tensor's own dtype: a half type's step is rounded, an integer's ends are."""

_PASSED = (torch.ops.aten.alias.default, torch.ops.aten.lift_fresh_copy.default, *DETACHING)
"""Operators that torch.export may leave out: they give what they are given."""

Table = Mapping[Any, Callable[..., Any]]


def decomposed(exported: Any) -> Any:
    """The `torch.export.ExportedProgram` with its operators taken apart; it may be changed in place."""
    without_writes(exported)
    try:
        return decompose_once(exported, traced, partial(_stays, _table(tuple(torch.ops))))
    except NotByKinds:
        return _whole(exported)


def traced(
    functions: Sequence[Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]], tensors: Sequence[torch.Tensor]
) -> tuple[Graph, list[list[Node]]]:
    """What `functions` of fake `tensors` become, as torch.export traces them.

    Returns:
        A graph from the tensors to the results of all functions, and the nodes that each function made, with those that
        the graph has no longer because nothing needs them.

    Raises:
        Exception: of any class, also where a version of PyTorch lacks what is used here.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

    composite, plain = _parts(tuple(torch.ops))
    made: list[list[Node]] = []

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        """All functions, on tensors that record changes in place as new tensors."""
        mode: Any = get_proxy_mode()
        nodes: Any = mode.tracer.graph.nodes
        results: list[Any] = []
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)):
            functional = [to_fun(x) for x in given]
            for function in functions:
                before = len(nodes)
                results += [from_fun(x) for x in function(functional)]
                made.append(list(islice(reversed(nodes), len(nodes) - before))[::-1])
        return results

    with (
        exported_program._override_composite_implicit_decomp(dict(composite)),
        enable_python_dispatcher(),
        FunctionalTensorMode(pre_dispatch=False, export=True),
    ):
        return make_fx(run, decomposition_table=dict(plain))(*tensors).graph, made


def _whole(exported: Any) -> Any:
    """The program, decomposed in one piece.

    The result equals that of ``run_decompositions``. That function overrides and restores each of PyTorch's 500
    composite operators, which takes two thirds of the time of a small capture. PyTorch decomposes most of them by
    itself, so only the others are overridden here. If this shortcut is missing or fails in a version of PyTorch, the
    public function is used.
    """
    namespaces = tuple(torch.ops)
    try:
        composite, plain = _parts(namespaces)
        with unset_fake_temporarily():
            return exported_program._decompose_exported_program(
                exported,
                cia_to_decomp=dict(composite),
                python_decomp_table=dict(plain),
                joint_loss_index=None,
                decompose_custom_triton_ops=False,
            )
    except Exception:  # noqa: BLE001 - torch.export raises classes of its own, none of them public; see above
        return exported.run_decompositions(dict(_table(namespaces)))


def _stays(table: Table, operator: Any) -> bool:
    """Whether PyTorch leaves calls of `operator` as they are: it is neither in `table` nor made of other operators."""
    if operator.namespace != "aten" or operator in _PASSED or operator in table:
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


@lru_cache(1)
def _table(namespaces: tuple[str, ...]) -> Table:
    """PyTorch's table without the operators that are kept, with `PARTS`.

    Made once, since it takes longer than a small capture.

    Args:
        namespaces: of all operators: with another one, operators may have come whose decompositions are to be found.
    """

    def is_kept(op: Any) -> bool:
        return isinstance(op, torch._ops.OpOverload) and op.name().split("::")[1].split(".")[0] in (*KEPT, *WRONG)

    every = torch.export.default_decompositions().items()
    return {op: _unless_rounded(op, made) for op, made in every if not is_kept(op)} | dict(PARTS)


def _unless_rounded(op: Any, made: Callable[..., Any]) -> Callable[..., Any]:
    """`made`, which leaves one of `MADE` whole in the dtypes where taking it apart gives other numbers."""
    if not isinstance(op, torch._ops.OpOverload) or op.name().split("::")[1].split(".")[0] not in MADE:
        return made

    def taken_apart(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if (dtype or torch.get_default_dtype()) not in (torch.float32, torch.float64):
            return NotImplemented
        return made(*args, dtype=dtype, **kwargs)

    return taken_apart


@lru_cache(1)
def _parts(namespaces: tuple[str, ...]) -> tuple[Table, Table]:
    """The table as torch.export splits it, without the composite operators that come apart by themselves."""
    composite, plain = exported_program._split_decomp_table_to_cia_and_python_decomp(dict(_table(namespaces)))
    return {op: made for op, made in composite.items() if not _is_own(op, made)}, plain


def _is_own(op: Any, made: Callable[..., Any]) -> bool:
    """Whether `made` is what PyTorch does with `op` anyway: torch.export binds the operator itself."""
    return isinstance(made, partial) and made.keywords.get("kernel") is op


__all__ = ["KEPT", "Table", "decomposed", "traced"]
