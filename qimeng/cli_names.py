"""Names that a user may give on the command line.

Deals in listing them for ``--help`` and in refusing unknown names before any work starts. Knows nothing about what they
mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

from qimeng.errors import QimengError
from qimeng.planner import PLANNERS, SEARCHES, make_search

Weights = Annotated[
    str,
    typer.Option(help="How weights of linear layers may be stored, such as int4:64, fp8 or csr:5. Default: as given."),
]
Activations = Annotated[
    str, typer.Option(help="How their inputs are read beside such weights, such as int8. Default: as given.")
]


def listed(names: Iterable[str]) -> str:
    """The names as a phrase.

    >>> listed(["greedy", "beam", "climb"])
    'beam, climb or greedy'
    """
    *first, last = sorted(names)
    return f"{', '.join(first)} or {last}" if first else last


PlannerName = Annotated[str, typer.Option(help=f"The planner: {listed(PLANNERS)}.")]
SearchName = Annotated[str, typer.Option(help=f"The search: {listed(SEARCHES)}; numbers may follow, as in beam:8.")]


def split(names: str) -> tuple[str, ...]:
    """The names between commas.

    >>> split("a, b"), split("")
    (('a', 'b'), ())
    """
    return tuple(filter(None, (name.strip() for name in names.split(","))))


def number(value: float | None) -> float | None:
    """For options that are seconds, sizes or costs: refuses what is below 0 or no number."""
    if value is not None and not value >= 0:
        raise typer.BadParameter(f"{value} is not a number from 0 on")
    return value


def check_names(
    planner: str,
    coder: str,
    search: str,
    mode: str,
    dtype: str,
    compile_modes: Sequence[str] = (),
    families: Sequence[str] = (),
) -> None:
    """Refuse unknown names.

    Raises:
        QimengError: the message lists those that are known.
    """
    from qimeng.bench.families import FAMILIES
    from qimeng.coder.named import is_form
    from qimeng.envs.judge.torch_compile import check_modes
    from qimeng.envs.steps.setup import make_coder
    from qimeng.spec import DTYPES, MODES

    try:
        make_search(search, planner)
        if not is_form(coder):  # one with a model is made where its server is known
            make_coder(coder)
        check_modes(compile_modes)
    except ValueError as error:
        raise QimengError(str(error)) from None
    for what, given, known in (
        ("precision mode", (mode,), MODES),
        ("dtype", (dtype,), tuple(DTYPES)),
        ("family", families, FAMILIES),
    ):
        for name in given:
            if name not in known:
                raise QimengError(f"unknown {what} {name!r}; known: {', '.join(known)}")


__all__ = ["Activations", "PlannerName", "SearchName", "Weights", "check_names", "listed", "number", "split"]
