"""What a problem of this suite is, and how the files beside this one list theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

FP16, BF16, FP64 = torch.float16, torch.bfloat16, torch.float64
INT8, INT32, INT64, UINT8 = torch.int8, torch.int32, torch.int64, torch.uint8


@dataclass(frozen=True)
class Problem:
    """A computation as a user would write it.

    Attributes:
        name: unique.
        thing: a function, or makes a module.
        inputs: makes the example inputs.
        stays: labels of the regions (one an operator at first) that stay on PyTorch.
        whole: words of the reason for which it is not captured at all; empty where it is.
        options: for `KernelSpec.of`.
    """

    name: str
    thing: Any
    inputs: Callable[[], tuple[Any, ...]]
    stays: tuple[str, ...] = ()
    whole: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        """What `KernelSpec.of` takes: the function, or a module with seeded weights."""
        torch.manual_seed(0)
        return self.thing() if isinstance(self.thing, type) else self.thing

    def examples(self) -> tuple[Any, ...]:
        """Example inputs, the same every time."""
        torch.manual_seed(1)
        return self.inputs()


def normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Makes normal inputs of the shapes."""
    return lambda: tuple(torch.randn(s).to(dtype) for s in shapes)


class Table:
    """The problems of one file; `table("name", inputs)` above a function or module adds one."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def __call__(
        self,
        name: str,
        inputs: Callable[[], tuple[Any, ...]],
        stays: tuple[str, ...] = (),
        whole: str = "",
        **options: Any,
    ) -> Callable[[Any], Any]:
        """Add what is below under `name` (see `Problem`)."""

        def enter(thing: Any) -> Any:
            self.problems.append(Problem(name, thing, inputs, stays, whole, options))
            return thing

        return enter


def problems() -> list[Problem]:
    """Every problem of the suite."""
    from tests.suite import (
        attention,
        convolutions,
        pointwise,
        products,
        recurrent,
        reductions,
        scans,
        shapes,
        structure,
    )

    modules = (pointwise, reductions, products, attention, scans, recurrent, structure, shapes, convolutions)
    return [p for module in modules for p in module.problem.problems]
