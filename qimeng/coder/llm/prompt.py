"""What a model is asked: the messages for a request, section by section, within a budget of tokens.

Deals in text. The words are files (`prompts/*.md`, `$name` where something is filled in), one a section, which a user
replaces by a folder of files of the same names; this module fills them in, puts them in order and trims them. A model
sees neither rewards nor times of other candidates, and whatever others wrote is fenced (`qimeng.coder.llm.fence`).

The reply it asks for: one fenced block that defines `region` (and `prepare` where buffers are made from parameters),
or search/replace edits of the text that `qimeng.coder.llm.shown.base_source` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from qimeng.actions.base import action_text
from qimeng.coder.llm.chat import ChatError, Message
from qimeng.coder.llm.fence import clipped, fenced
from qimeng.coder.llm.shown import base_source, shown_source, target_region
from qimeng.graph.opgraph import Value
from qimeng.graph.region import Region
from qimeng.interfaces import Request


def four_characters(text: str) -> int:
    """An estimate of the tokens of `text` where no tokenizer is given: a quarter of its characters."""
    return (len(text) + 3) // 4


@dataclass(frozen=True)
class Limits:
    """How long a prompt may be.

    Attributes:
        tokens: most tokens of all messages together.
        reason: most characters of a gate's message.
        count: how many tokens a text has.
    """

    tokens: int = 12_000
    reason: int = 3_000
    count: Callable[[str], int] = four_characters


class Prompts:
    """The words of the sections, by name.

    Args:
        folder: files ``NAME.md`` here replace those of the package; an empty one leaves its section out.

    Raises:
        CoderError: the folder is not one, or holds a file of a name that no section has.
    """

    def __init__(self, folder: str | Path | None = None):
        self._texts = {
            entry.name.removesuffix(".md"): entry.read_text(encoding="utf-8")
            for entry in files("qimeng.coder.llm").joinpath("prompts").iterdir()
            if entry.name.endswith(".md")
        }

    def fill(self, name: str, **values: str) -> str:
        """The section called `name` with its places filled in."""
        return Template(self._texts[name]).substitute(values).strip()


def write_messages(
    request: Request,
    *,
    similar: Sequence[str] = (),
    limits: Limits | None = None,
    prompts: Prompts | None = None,
) -> tuple[Message, ...]:
    """The conversation that asks for the patch of `request`.

    On repair the refused patch is the model's own last turn, and the gate's message the answer to it.

    Raises:
        ChatError: (``"too-long"``) what cannot be left out is longer than the limit.
        IllegalAction: the action names no region of this program.
    """
    limits, prompts = limits or Limits(), prompts or Prompts()
    region = target_region(request)
    messages = [
        Message("system", prompts.fill("system", rules=prompts.fill("rules"))),
        Message("user", "\n\n".join(_sections(request, region, prompts))),
    ]
    base = base_source(request)
    if request.failed is not None and base is not None:
        reason = fenced(clipped(request.reason or "no reason given", limits.reason), "the judge's message", "text")
        messages += [
            Message("assistant", f"```python\n{base}```"),
            Message("user", prompts.fill("repair", reason=reason)),
        ]
    total = sum(limits.count(m.text) for m in messages)
    if total > limits.tokens:
        raise ChatError(f"the prompt has {total} tokens, the limit is {limits.tokens}", "too-long")
    return tuple(messages)


def _sections(request: Request, region: Region, prompts: Prompts) -> list[str]:
    inputs = "\n".join(f"- x{i}: {_tensor(region, v)}" for i, v in enumerate(region.inputs))
    outputs = "\n".join(f"- {i}: {_tensor(region, v)}" for i, v in enumerate(region.outputs))
    text = fenced(region.function(), "the region in PyTorch")
    present = [request.program.implementation(request.program.region(r)) for r in request.action.regions]
    return [
        prompts.fill("region", text=text, inputs=inputs, outputs=outputs),
        prompts.fill("present", text="\n\n".join(fenced(shown_source(i), f"written in {i.language}") for i in present)),
        prompts.fill("action", text=action_text(request.action, request.program)),
        prompts.fill("reply"),
    ]


def _tensor(region: Region, value: Value) -> str:
    meta, node = region.graph.meta(value), region.graph.nodes[value.node]
    held = {"parameter": ", a parameter", "buffer": ", a buffer", "scalar": ", a Python number"}.get(node.kind, "")
    return f"shape {meta.shape}, strides {meta.stride}, {meta.dtype}{held}"


__all__ = ["Limits", "Prompts", "four_characters", "write_messages"]
