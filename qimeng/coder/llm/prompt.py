"""What a model is asked: the messages for a request, section by section, within a budget of tokens.

Deals in text. The words are files (`qimeng.coder.llm.words`); this module fills them in, puts them in order and leaves
out what does not fit. A model sees neither rewards nor times of other candidates, and whatever others wrote is fenced
(`qimeng.coder.llm.fence`).

The reply it asks for: one fenced block that defines `region` (and `prepare` where buffers are made from parameters),
or search/replace edits of the text that `qimeng.coder.llm.shown.base_source` gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qimeng.actions import action_text, kind_named
from qimeng.coder.llm.advice import advise
from qimeng.coder.llm.chat import ChatError, Message
from qimeng.coder.llm.example import example
from qimeng.coder.llm.fence import clipped, fenced, tame
from qimeng.coder.llm.shown import base_source, shown_names, shown_source, target_region
from qimeng.coder.llm.similar import Similar
from qimeng.coder.llm.words import Words
from qimeng.device import Device
from qimeng.family import concerned
from qimeng.graph.opgraph import Value
from qimeng.graph.region import Region
from qimeng.interfaces import Request, Step

TRIMS = ("similar", "example", "tried", "device", "advice")
"""Sections that may be left out, the first to go first; similar patches go one by one."""

STEPS = 8
"""Most refused steps that are shown."""


def four_characters(text: str) -> int:
    """An estimate of the tokens of `text` where no tokenizer is given: a quarter of its characters."""
    return (len(text) + 3) // 4


@dataclass(frozen=True)
class Limits:
    """How long a prompt may be.

    Attributes:
        tokens: most tokens of all messages together.
        reason: most characters of a gate's message; a message of an earlier step gets a tenth.
        count: how many tokens a text has.
    """

    tokens: int = 12_000
    reason: int = 3_000
    count: Callable[[str], int] = four_characters


def write_messages(
    request: Request,
    *,
    similar: Sequence[Similar] = (),
    limits: Limits | None = None,
    words: Words | None = None,
) -> tuple[Message, ...]:
    """The conversation that asks for the patch of `request`.

    On repair the refused patch is the model's own last turn, and the gate's message the answer to it.

    Args:
        request: what is asked for.
        similar: accepted patches to show, the most similar first.
        limits: how long the conversation may be.
        words: the sections' words; the package's by default.

    Raises:
        ChatError: (``"too-long"``) what cannot be left out is longer than the limit.
        IllegalAction: the action names no region of this program.
    """
    limits = limits or Limits()
    sections = Sections(request, limits, words or Words())
    for shown, left_out in _levels(len(similar)):
        messages = sections.messages(similar[:shown], left_out)
        total = sum(limits.count(m.text) for m in messages)
        if total <= limits.tokens:
            return messages
    text = f"the shortest prompt for {sections.region.label()} has {total} tokens, the limit is {limits.tokens}"
    raise ChatError(f"{text}; raise the limit, or unfuse the region", "too-long")


def _levels(similar: int) -> list[tuple[int, tuple[str, ...]]]:
    """(similar patches shown, sections left out), from everything to the least."""
    return [(n, ()) for n in range(similar, -1, -1)] + [(0, TRIMS[: i + 1]) for i in range(1, len(TRIMS))]


class Sections:
    """The sections of one request, each a text, empty where there is nothing to say.

    Args:
        request: what is asked for.
        limits: of messages that are shown.
        words: the sections' words.
    """

    def __init__(self, request: Request, limits: Limits, words: Words):
        self.request, self.limits, self.words = request, limits, words
        self.region = target_region(request)

    def messages(self, similar: Sequence[Similar], left_out: Sequence[str] = ()) -> tuple[Message, ...]:
        """The conversation with some sections left out."""
        request, words = self.request, self.words
        parts = {
            "region": self.text_of_region(),
            "present": self.present(),
            "device": self.device(request.device),
            "advice": self.advice(),
            "tried": self.tried(request.history),
            "similar": self.similar(similar),
            "example": self.example(),
            "action": self.action(),
            "cuda": self.cuda(),
            "reply": words.fill("reply" if base_source(request) is not None else "reply-whole"),
        }
        mode = words.fill(f"mode-{request.mode}")
        messages = [
            Message("system", words.fill("system", rules=words.fill("rules", precision=mode))),
            Message("user", "\n\n".join(t for name, t in parts.items() if t and name not in left_out)),
        ]
        failed = (
            request.failed.alternatives[request.refused] if request.failed and request.failed.alternatives else None
        )
        if failed is not None:
            reason = clipped(shown_names(request.reason or "no reason given", failed), self.limits.reason)
            messages += [
                Message("assistant", f"```python\n{shown_source(failed)}```"),
                Message("user", words.fill("repair", reason=fenced(reason, "what the judge says", "text"))),
            ]
        return tuple(messages)

    def text_of_region(self) -> str:
        """What is to be computed, with the shape, strides and dtype of what goes in and out."""
        region = self.region
        return self.words.fill(
            "region",
            text=fenced(region.function(), "the region in PyTorch"),
            inputs="\n".join(f"- x{i}: {_tensor(region, v)}" for i, v in enumerate(region.inputs)),
            outputs="\n".join(f"- {i}: {_tensor(region, v)}" for i, v in enumerate(region.outputs)),
            sizes=_sizes([region.graph.meta(v).shape for v in (*region.inputs, *region.outputs)]),
        )

    def present(self) -> str:
        """The code that computes it now, that of each part before a fusion; not again what `text_of_region` shows."""
        program, fused = self.request.program, len(self.request.action.regions) > 1
        regions = [program.region(r) for r in self.request.action.regions]
        found = [(r.label(), program.implementation(r)) for r in regions]
        texts = [
            fenced(shown_source(i), f"{f'{label}, ' if fused else ''}written in {i.language}") for label, i in found
        ]
        if not fused and shown_source(found[0][1]) == self.region.function():
            texts = ["PyTorch runs the function above, as it stands."]
        return self.words.fill("present", text="\n\n".join(texts))

    def cuda(self) -> str:
        """How CUDA C++ is written and launched, where the region is, or is to be, in that language."""
        request = self.request
        written = [request.program.implementation(request.program.region(r)) for r in request.action.regions]
        wanted = request.action.kind == "language" and request.action.param == "cuda"
        return self.words.fill("cuda") if wanted or any(i.language == "cuda" for i in written) else ""

    def device(self, device: Device) -> str:
        """The GPU in numbers."""
        return self.words.fill(
            "device",
            name=device.name,
            arch=device.target,
            sms=str(device.sms),
            shared=str(device.shared_per_block),
            registers=str(device.registers_per_sm),
            warp=str(device.warp_size),
            l2=f"{device.l2_bytes / 2**20:.0f}",
            bandwidth=f"{device.bandwidth_gbs:.0f}",
            fp32=f"{device.fp32_tflops:g}",
            tf32=f"{device.tf32_tflops:g}",
            half=f"{device.half_tflops:g}",
        )

    def advice(self) -> str:
        """What follows from the measurements of the program as it stands."""
        request = self.request
        regions = [request.program.region(r) for r in request.action.regions]
        found = [
            a for r in regions for a in advise(request.evaluation, r, request.program.implementation(r), request.device)
        ]
        return self.words.fill("advice", text="\n".join(f"- {a}" for a in found)) if found else ""

    def tried(self, history: Sequence[Step]) -> str:
        """The last steps that were refused, and why."""
        refused = [s for s in history if not s.accepted and s.evaluation is not None][-STEPS:]
        lines = [
            f"{s.action}: {clipped(s.evaluation.error or '', self.limits.reason // 10)}"
            for s in refused
            if s.evaluation
        ]
        return self.words.fill("tried", text=fenced("\n".join(lines), "refused steps", "text")) if lines else ""

    def similar(self, similar: Sequence[Similar]) -> str:
        """Accepted patches of other programs."""
        texts = [fenced(s.source(), s.traits.text()) for s in similar]
        return self.words.fill("similar", text="\n\n".join(texts)) if texts else ""

    def example(self) -> str:
        """The kind of change on a tiny program."""
        request = self.request
        if self.words.leaves_out("example"):  # finding one takes seconds
            return ""
        found = example(request.action, request.device, request.mode, concerned(self.region))
        if found is None:
            return ""
        language = "diff" if found[1].startswith("@@") else "python"
        return self.words.fill(
            "example",
            kind=request.action.kind,
            before=fenced(found[0], "before"),
            after=fenced(found[1], "after", language),
        )

    def action(self) -> str:
        """The one change to make, what its kind means, and what the user adds."""
        request = self.request
        about = (kind_named(request.action.kind).__doc__ or "").strip().split("\n\n")
        meaning = " ".join(line.strip() for line in "\n".join(about).splitlines() if line.strip())
        text = self.words.fill("action", text=action_text(request.action, request.program), meaning=meaning)
        if request.instruction:
            text += "\n\n" + self.words.fill("instruction", text=tame(request.instruction))
        return text


def _sizes(shapes: Sequence[Sequence[int]]) -> str:
    """Extents and numbers of elements, each as an odd number times a power of two: what blocks divide.

    >>> _sizes([(96, 8), (8,)])
    '8 = 1 x 8, 96 = 3 x 32, 768 = 3 x 256'
    """
    numbers = sorted({n for shape in shapes for n in (*shape, math.prod(shape)) if n > 1})
    return ", ".join(f"{n} = {n // (n & -n)} x {n & -n}" for n in numbers)


def _tensor(region: Region, value: Value) -> str:
    meta, node = region.graph.meta(value), region.graph.nodes[value.node]
    held = {"parameter": ", a parameter", "buffer": ", a buffer", "scalar": ", a Python number"}.get(node.kind, "")
    return f"shape {meta.shape}, strides {meta.stride}, {meta.dtype}{held}"


__all__ = ["Limits", "STEPS", "TRIMS", "Sections", "four_characters", "write_messages"]
