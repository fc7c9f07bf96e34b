"""Coders by name, as `plan_and_code` and the command line take them.

Deals in names and in what a model may cost. Modules are loaded when they are named.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qimeng.interfaces import Coder

if TYPE_CHECKING:
    from qimeng.coder.llm.account import Allowance, Prices
    from qimeng.coder.llm.chat import Chat

FORMS = ("openai:MODEL", "transformers:FOLDER[+ADAPTER]", "hybrid:openai:MODEL", "hybrid:transformers:FOLDER")
"""What the name of a coder with a model looks like."""


def is_form(name: str) -> bool:
    """Whether `name` looks like one of `FORMS`.

    >>> [is_form(n) for n in ("openai:m", "hybrid:transformers:runs/m", "openai:", "hybrid:m", "template")]
    [True, True, False, False, False]
    """
    kind, _, model = name.removeprefix("hybrid:").partition(":")
    return kind in ("openai", "transformers") and bool(model)


def coder_named(
    name: str,
    *,
    base_url: str | None = None,
    allowance: Allowance | None = None,
    prices: Prices | None = None,
    candidates: int = 1,
    prompts: str | Path | None = None,
) -> Coder:
    """The coder called `name`.

    Args:
        name: of one of the `FORMS`: a model behind an OpenAI-compatible endpoint, or in this process, with an adapter
            or without; after ``hybrid:`` it works where the templates end.
        base_url: of the endpoint (``"http://localhost:8000/v1"``); OpenAI's own by default.
        allowance: what the model may be asked for; no limit by default.
        prices: what a million tokens cost.
        candidates: answers to each request; the judge keeps the fastest kernel that is right.
        prompts: folder of files that replace the package's prompts (`qimeng.coder.llm.words.Words`).

    Raises:
        ValueError: another name, an allowance of money without prices, or `candidates` out of range.
        ChatError: the model cannot be used here; the message says what is missing.
    """
    from qimeng.coder.hybrid import HybridCoder
    from qimeng.coder.llm.account import Account, Allowance, Prices
    from qimeng.coder.llm.coder import LLMCoder
    from qimeng.coder.llm.words import Words

    if not is_form(name):
        raise ValueError(f"{name!r} is no coder with a model; known: {', '.join(FORMS)}")
    kind, _, model = name.removeprefix("hybrid:").partition(":")
    account = Account(allowance or Allowance(), prices or Prices())
    coder = LLMCoder(_chat(kind, model, base_url), account, candidates, words=Words(prompts))
    return HybridCoder(coder) if name.startswith("hybrid:") else coder


def _chat(kind: str, model: str, base_url: str | None) -> Chat:
    if kind == "openai":
        from qimeng.coder.llm.keys import check_reachable
        from qimeng.coder.llm.openai_chat import OpenAIChat

        check_reachable(base_url)
        return OpenAIChat(model, base_url)
    from qimeng.coder.llm.local_chat import LocalChat

    return LocalChat(model)


__all__ = ["FORMS", "coder_named", "is_form"]
