"""Finds the operators of a module that draw random numbers, and repeats their draws.

Deals in a module's run, watched for operators that PyTorch itself marks as seeded. The draws of one run can be reused
in a run with a different dtype. So a computation with dropout has a float64 result like any other. Knows nothing about
the use of the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from qimeng.spec.dispatch import DispatchMode

Result = TypeVar("Result")
Draws = list[tuple[str, torch.Tensor]]
"""In order, the names of the operators that drew, and what they drew; of dropout the mask."""

_DROPOUT = "aten.native_dropout"
_NOISE = frozenset(
    f"aten.{name}"
    for name in (
        "rand randn randint rand_like randn_like randint_like randperm bernoulli bernoulli_ uniform uniform_ normal_ "
        "exponential exponential_ random_ geometric_ cauchy_ log_normal_"
    ).split()
)
"""Operators whose output is what they draw; others (attention with dropout, rrelu) mix it with what they are given."""


def random_operators(run: Callable[[], Result]) -> tuple[Result, tuple[str, ...]]:
    """What `run` returns, and the names of its operators that draw random numbers, sorted.

    >>> random_operators(lambda: torch.nn.functional.dropout(torch.zeros(1), 0.5).item())
    (0.0, ('aten.bernoulli_',))
    """
    watch = _Watch()
    with watch:
        result = run()
    return result, tuple(sorted(watch.names))


def can_repeat(names: Iterable[str]) -> bool:
    """Whether the draws of operators of these names can be given to another run."""
    found = set(names)
    return bool(found) and found <= _NOISE | {_DROPOUT}


def draws_of(run: Callable[[], object]) -> Draws:
    """What the random operators of `run` draw."""
    record = _Record()
    with record:
        run()
    return record.draws


def repeating(draws: Draws, run: Callable[[], Result]) -> Result:
    """What `run` returns where its random operators draw `draws`.

    Args:
        draws: of a run of the same operators, in any dtype.
        run: the computation.

    Raises:
        ValueError: it draws something else: other operators, shapes or places.

    >>> x = torch.ones(8)
    >>> draws = draws_of(lambda: torch.nn.functional.dropout(x, 0.5))
    >>> y = repeating(draws, lambda: torch.nn.functional.dropout(x.double(), 0.5))
    >>> torch.equal(y, repeating(draws, lambda: torch.nn.functional.dropout(x, 0.5)).double())
    True
    """
    repeat = _Repeat(draws)
    with repeat:
        result = run()
    if repeat.draws:
        raise ValueError(f"{repeat.draws[0][0]} was not asked again")
    return result


class _Mode(DispatchMode):
    """Hands calls of random operators to `drawn`."""

    def drawn(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def call(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        return self.drawn(str(func.overloadpacket), func, args, kwargs or {})


class _Watch(_Mode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def drawn(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        self.names.add(name)
        return func(*args, **kwargs)


class _Record(_Mode):
    def __init__(self) -> None:
        super().__init__()
        self.draws: Draws = []

    def drawn(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        found = func(*args, **kwargs)
        noise = found[1] if name == _DROPOUT else found
        self.draws.append((name, noise.clone()))  # it may be changed in place
        return found


class _Repeat(_Mode):
    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.draws = list(draws)

    def drawn(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        found = func(*args, **kwargs)  # tells shape, dtype and place; in-place operators change their first argument
        own = found[1] if name == _DROPOUT else found
        before, noise = self.draws.pop(0) if self.draws else ("nothing", own)
        if (before, noise.shape, noise.device) != (name, own.shape, own.device):
            raise ValueError(f"{name} {tuple(own.shape)} draws where {before} {tuple(noise.shape)} did")
        if name != _DROPOUT:
            return found.copy_(noise)
        x, share, training = args
        if training is False:  # nothing is dropped or scaled
            return found
        return x * noise * (1 / (1 - share) if share < 1 else 0.0), noise


__all__ = ["Draws", "can_repeat", "draws_of", "random_operators", "repeating"]
