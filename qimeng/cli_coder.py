"""The options of the command line that say which model writes, and what it may cost.

Deals in options. Knows nothing about models.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qimeng.errors import QimengError

if TYPE_CHECKING:
    from qimeng.coder.llm.account import Prices
    from qimeng.interfaces import Coder

CoderName = Annotated[
    str,
    typer.Option(help="Who writes: template, openai:MODEL, transformers:FOLDER[+ADAPTER]; hybrid: before a model's."),
]
BaseUrl = Annotated[str, typer.Option(help="Of the model's OpenAI-compatible endpoint; OpenAI's own by default.")]
Calls = Annotated[int | None, typer.Option(min=0, help="Most answers that a model may give.")]
Tokens = Annotated[int | None, typer.Option(min=0, help="Most tokens that a model may read and write.")]
Money = Annotated[float | None, typer.Option(min=0, help="Most that a model may cost; needs --llm-prices.")]
PriceList = Annotated[str, typer.Option(help="What a million tokens cost, read and written: 2.5,10.")]
Candidates = Annotated[int, typer.Option(min=1, max=8, help="Answers to each request; the fastest right one is kept.")]

Prompts = Annotated[Path | None, typer.Option(help="Folder of files that replace the package's prompts.")]


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
    from qimeng.envs.setup import make_coder

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


def coder_label(name: str, candidates: int = 1, prompts: Path | None = None) -> str:
    """What tables and rows call the coder: what bears on what it writes.

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
    "coder_label",
    "made_coder",
]
