"""Command-line options for the coder: which model to use, and its budget.

Deals in options. Knows nothing about models.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qimeng.cli_names import number
from qimeng.errors import QimengError

if TYPE_CHECKING:
    from qimeng.coder.llm.account import Prices
    from qimeng.interfaces import Coder

CoderName = Annotated[
    str,
    typer.Option(
        help="The coder: template, openai:MODEL, transformers:FOLDER[+ADAPTER], or hybrid: and one of the two."
    ),
]
BaseUrl = Annotated[str, typer.Option(help="URL of an OpenAI-compatible endpoint. Default: OpenAI's own.")]
Calls = Annotated[int | None, typer.Option(min=0, help="Maximum number of answers from the model.")]
Tokens = Annotated[int | None, typer.Option(min=0, help="Maximum number of tokens, read and written.")]
Money = Annotated[float | None, typer.Option(callback=number, help="Maximum cost; needs --llm-prices.")]
PriceList = Annotated[str, typer.Option(help="Price of a million tokens read, and written: 2.5,10.")]
Candidates = Annotated[
    int, typer.Option(min=1, max=8, help="Answers to ask for each time; the fastest right one is kept.")
]

Prompts = Annotated[Path | None, typer.Option(help="Folder with files that replace the package's prompts.")]


def made_coder(
    name: str,
    base_url: str,
    calls: int | None,
    tokens: int | None,
    money: float | None,
    prices: str,
    candidates: int = 1,
    prompts: Path | None = None,
) -> Coder:
    """The coder that the options ask for.

    Raises:
        QimengError: an option that makes no sense.
    """
    from qimeng.coder.llm.account import Allowance
    from qimeng.envs.steps.setup import make_coder

    try:
        return make_coder(
            name,
            base_url=base_url or None,
            allowance=Allowance(calls, tokens, money),
            prices=_prices(prices),
            candidates=candidates,
            prompts=prompts,
        )
    except ValueError as error:
        raise QimengError(str(error)) from None


def check_answered(coder: Coder) -> None:
    """Refuse, when all is written, a run whose model was asked and never answered.

    Raises:
        ChatError: it is one.
    """
    from qimeng.coder.llm.coder import ModelMemory

    if isinstance(coder.memory, ModelMemory):
        coder.memory.check_answered()


def coder_label(name: str, candidates: int = 1, prompts: Path | None = None) -> str:
    """The coder's name in tables and rows, with the options that change what it writes.

    >>> coder_label("openai:m", 4)
    'openai:m, 4 candidates'
    """
    return name + (f", {candidates} candidates" if candidates > 1 else "") + (f", prompts {prompts}" if prompts else "")


def _prices(text: str) -> Prices:
    from qimeng.coder.llm.account import Prices

    try:
        values = [float(part) for part in text.split(",")] if text else [0.0, 0.0]
    except ValueError:
        values = []
    if len(values) != 2 or not all(0 <= v < float("inf") for v in values):
        raise QimengError(f"--llm-prices takes two numbers, as in 2.5,10; got {text!r}")
    return Prices(*values)


__all__ = [
    "BaseUrl",
    "Calls",
    "Candidates",
    "CoderName",
    "Money",
    "PriceList",
    "Prompts",
    "Tokens",
    "check_answered",
    "coder_label",
    "made_coder",
]
