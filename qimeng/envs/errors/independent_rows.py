"""Finds out whether a computation treats the rows of its inputs alone, so that it can be run on some rows at a time.

A row is what stands at one index of the leading axis. Every operator of a run is watched: it must be one of those that
are known to keep rows apart. A tensor may have several rows, one after the other, for each row of the inputs. What ran
is noted without the number of rows, so a run on some rows can be compared with the run on all: a module whose code asks
for the number of rows shows.

Deals in operators as they run. Knows nothing about specifications or errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.weak import WeakIdKeyDictionary

from qimeng.graph.ops import POINTWISE
from qimeng.spec.dispatch import DispatchMode

FEW = 16
"""Elements of a constant of the module's code whose values are noted."""

_NOT_POINTWISE = frozenset(
    f"aten.{name}" for name in "tril triu arange full scalar_tensor lift_fresh_copy copy glu native_dropout".split()
)
_ALONG = frozenset(
    f"aten.{name}"
    for name in (
        "sum mean amax amin max min prod var var_mean std argmax argmin any all logsumexp linalg_vector_norm norm "
        "_softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp glu flip roll sort topk unsqueeze squeeze "
        "transpose select slice split split_with_sizes unbind cat stack"
    ).split()
)
"""Operators along dimensions that they name."""
_RESHAPES = frozenset(f"aten.{name}" for name in "view _unsafe_view reshape expand".split())
_SAME = frozenset(f"aten.{name}" for name in "alias detach view_as_real".split())
_PLANES = {
    f"aten.{name}": dims
    for dims, names in (
        (1, "avg_pool1d"),
        (2, "avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d adaptive_max_pool2d"),
        (3, "avg_pool3d max_pool3d_with_indices _adaptive_avg_pool3d adaptive_max_pool3d"),
    )
    for name in names.split()
}
"""Operators on the last dimensions, so many, that keep all before these."""
_BATCH_NORMS = ("aten.native_batch_norm", "aten.cudnn_batch_norm", "aten._native_batch_norm_legit_no_training")
_DIMENSIONS = ("dim", "dims", "dim0", "dim1", "dimension", "axis")
_COUNTED = ("size", "N")
"""Arguments that may contain the number of rows, as their first or only number."""


class RowsMix(Exception):
    """An operator is not known to keep rows apart; the message names it."""


class IndependentRows(DispatchMode):
    """In the block, refuses what may mix rows.

    Args:
        inputs: of the run that have rows.
        held: its other inputs, the module's parameters and buffers.
        rows: of the inputs.

    Attributes:
        noted: what ran, without the number of rows.

    Raises:
        RowsMix: an operator ran that is not known to keep rows apart.
    """

    def __init__(self, inputs: Iterable[torch.Tensor], held: Iterable[torch.Tensor], rows: int):
        super().__init__()
        self._rows, self.noted = rows, list[Any]()
        self._known = WeakIdKeyDictionary()
        for x, mine in (*((x, True) for x in inputs), *((x, False) for x in held)):
            self._known[x] = mine
        self._given = {x.untyped_storage().data_ptr() for x in self._known} - {0}

    def has_rows(self, x: Any) -> bool:
        """Whether `x` is a tensor that has rows."""
        return isinstance(x, torch.Tensor) and bool(self._known.get(x, False))

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator (see the class)."""
        kwargs = kwargs or {}
        given = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        fresh = func.overloadpacket.__name__ in ("lift_fresh", "lift_fresh_copy")
        if fresh and all(x.numel() <= FEW for x in given):
            self.noted.append(("values", *(tuple(x.reshape(-1).tolist()) for x in given)))
        elif any(x not in self._known for x in given):
            raise RowsMix(f"{func}: a tensor came from elsewhere")
        named = _named(func, args, kwargs)
        found = func(*args, **kwargs)
        made = [x for x in _pytree.tree_leaves(found) if isinstance(x, torch.Tensor) and x.numel()]
        mine = [x for x in given if self.has_rows(x)]
        if func._schema.is_mutable and any(x.untyped_storage().data_ptr() in self._given for x in made):
            raise RowsMix(f"{func} changes an input or a parameter")
        if mine:
            self._check(func, named, mine, given, made)
        elif func._schema.is_mutable and any(self.has_rows(x) for x in made):
            raise RowsMix(str(func))
        for x in made:
            self._known[x] = bool(mine)
        self.noted.append((str(func), tuple((n, self._note(n, value, bool(mine))) for n, value in named.items())))
        return found

    # -- parts

    def _check(
        self,
        func: Any,
        named: dict[str, Any],
        mine: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
    ) -> None:
        name = f"aten.{func.overloadpacket.__name__.removesuffix('_')}"
        base = str(func.overloadpacket).removesuffix("_")
        whole = all(x.dim() and x.shape[0] % self._rows == 0 and x.device == mine[0].device for x in made)
        if base != name or not whole or not self._keeps(name, func, named, mine, given, made):
            raise RowsMix(str(func))

    def _keeps(
        self,
        name: str,
        func: Any,
        named: dict[str, Any],
        mine: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
    ) -> bool:
        """Whether each row of what was `made` depends on the same row of `mine` alone."""
        x, first = mine[0], given[0]
        leading = all(y.shape[0] == x.shape[0] for y in (*mine, *made))
        alone = len(mine) == 1 and first is x
        pairwise = name in ("aten.max", "aten.min") and func._overloadname == "other"
        if name in _RESHAPES:
            return alone and (name != "aten.expand" or (leading and made[0].dim() == x.dim()))
        if name in _SAME:
            return leading
        if pairwise or (name in POINTWISE and name not in _NOT_POINTWISE):
            width = made[0].dim()
            others = [y for y in given if not self.has_rows(y)]
            flat = all(y.dim() < width or (y.dim() == width and y.shape[0] == 1) for y in others)
            return leading and flat and all(y.dim() == width for y in mine)
        if name in _ALONG:
            return leading and len(mine) == len(given) and self._spares_rows(func, named, mine, made)
        if name == "aten.permute":
            return leading and named["dims"][0] % x.dim() == 0
        if name in ("aten.mm", "aten.mv", "aten.convolution", "aten.linear"):
            return leading and alone
        if name == "aten.addmm":
            bias = named["self"]
            flat = not self.has_rows(bias) and (bias.dim() < 2 or bias.shape[0] == 1)
            return leading and flat and len(mine) == 1 and named["mat1"] is x
        if name == "aten.bmm":
            return leading and len(mine) == 2
        if name == "aten.native_layer_norm":
            return leading and alone and len(named["normalized_shape"]) < x.dim()
        if name == "aten.native_group_norm":
            return leading and alone and named["N"] == x.shape[0]
        if name in _BATCH_NORMS:
            return leading and alone and not named.get("training", False)
        if name in _PLANES:
            return leading and alone and x.dim() > _PLANES[name]
        if name == "aten.constant_pad_nd":
            return leading and alone and len(named["pad"]) // 2 < x.dim()
        return False

    def _spares_rows(
        self, func: Any, named: dict[str, Any], mine: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> bool:
        """Whether none of the named dimensions is that of the rows."""
        width = max(mine[0].dim(), made[0].dim())
        defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        values = [(defaults | named).get(n) for n in _DIMENSIONS if any(a.name == n for a in func._schema.arguments)]
        dims = [d for v in values for d in (v if isinstance(v, (list, tuple)) else (v,))]
        return bool(dims) and all(isinstance(d, int) and d % width != 0 for d in dims)

    def _note(self, name: str, value: Any, counted: bool) -> Any:
        """What is noted of an argument."""
        if isinstance(value, torch.Tensor):
            if self.has_rows(value):
                return "rows", value.shape[0] // self._rows, tuple(value.shape[1:])
            return "same", tuple(value.shape)
        if isinstance(value, (list, tuple)):
            head = value[:1] if counted and name in _COUNTED else ()
            return (*(self._note(name, v, True) for v in head), *(self._note("", v, False) for v in value[len(head) :]))
        if counted and name in _COUNTED and isinstance(value, int) and value > 0:
            return "rows", value / self._rows
        return None if isinstance(value, (torch.dtype, torch.device, torch.layout)) else value


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**{a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}


def watched(
    run: Callable[[], Any], inputs: Iterable[torch.Tensor], held: Iterable[torch.Tensor], rows: int
) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors that `run` returns, all of which have rows, and what was noted; the arguments as `IndependentRows`.

    Raises:
        RowsMix: some row of a result may depend on other rows of the inputs.
    """
    watch = IndependentRows(inputs, held, rows)
    with watch:
        output = run()
    made = [x for x in _pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
    if not all(watch.has_rows(x) for x in made):
        raise RowsMix("a result has no rows")
    return made, watch.noted


__all__ = ["IndependentRows", "RowsMix", "watched"]
