"""The steps that were accepted on one spec, written once more on the same computation with other sizes.

Deals in the named sizes at the head of a spec's text (``ROWS = 1152``), in paths of actions and in what the template
coder writes for them. Nobody judged those patches: known is that the same steps were right, and gained, at the spec's
own sizes.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Collection, Iterator
from dataclasses import replace

from qimeng.actions import Context, check_action
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import Device
from qimeng.errors import CoderError, IllegalAction, QimengError
from qimeng.interfaces import Action, Patch, Request
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec

USUAL = (
    8,
    16,
    24,
    32,
    48,
    49,
    64,
    77,
    96,
    100,
    128,
    192,
    196,
    197,
    200,
    256,
    300,
    320,
    384,
    400,
    500,
    512,
    640,
    768,
    1000,
    1024,
    1025,
    1280,
    1536,
    2000,
    2048,
    2999,
    3072,
    4096,
    4099,
    5120,
    8192,
    10000,
    12288,
    16384,
    50257,
)
"""Extents as models have them."""

ELEMENTS = (1 << 12, 1 << 23)
"""Least and most elements of the largest value of a computation with other sizes."""

_SIZE = re.compile(r"^([A-Z][A-Z_0-9]*) = (\d+)$", re.M)

Path = tuple[Action, ...]


def other_sizes(source: str, rng: random.Random) -> str:
    """`source` with other values for its named sizes; some of them may fit together no longer."""

    def other(found: re.Match[str]) -> str:
        old, way = int(found.group(2)), rng.random()
        if old < 8 or way < 0.2:
            new = old
        elif way < 0.5:
            new = max(4, round(old * 2.0 ** rng.randint(-3, 3)))
        elif way < 0.8:
            new = rng.choice([n for n in USUAL if old / 16 <= n <= 16 * old] or [old])
        else:
            new = round(math.exp(rng.uniform(math.log(old / 8), math.log(old * 8))))
        return f"{found.group(1)} = {max(new, 4) if old >= 4 else new}"

    return _SIZE.sub(other, source)


def resized(
    spec: KernelSpec, paths: Collection[Path], device: Device, count: int, seed: int = 0
) -> Iterator[tuple[KernelSpec, Request, Patch]]:
    """The last step of each of `paths`, at up to `count` other sizes of `spec`: spec, request and what is written.

    Args:
        spec: with a text.
        paths: actions from the start, one after another.
        device: what it is written for.
        count: how many other sizes.
        seed: of the sizes.
    """
    rng, texts = random.Random(f"{seed}/{spec.digest}"), {spec.source or ""}
    for _ in range(2 * count):  # some sizes fit no more
        if len(texts) > count:
            return
        try:
            other, start = _moderate(other_sizes(spec.source or "", rng), spec)
        except QimengError:
            continue
        if other.source and other.source not in texts and _largest(start) >= ELEMENTS[0]:
            texts.add(other.source)
            for request, patch in _again(start, paths, device, spec.mode):
                yield other, request, patch


def _moderate(text: str, like: KernelSpec) -> tuple[KernelSpec, Program]:
    """The spec with `text`, its largest named size halved until no value is too large, and its first program.

    Raises:
        QimengError: it cannot be captured.
    """
    while True:
        spec = KernelSpec.from_source(text, like.name, dtype=like.dtype, mode=like.mode)
        start = Program.start(capture_spec(spec, verify=False))
        largest = max(_SIZE.finditer(text), key=lambda found: int(found.group(2)), default=None)
        if _largest(start) <= ELEMENTS[1] or largest is None:
            return spec, start
        begin, end = largest.span(2)
        times = 1 << max(1, (_largest(start) // ELEMENTS[1]).bit_length() - 1)  # a capture takes a quarter of a second
        text = f"{text[:begin]}{max(1, int(largest.group(2)) // times)}{text[end:]}"


def _largest(start: Program) -> int:
    """Elements of the largest value that goes into a region or comes out of one."""
    metas = [r.graph.meta(v) for r in start.regions for v in (*r.inputs, *r.outputs)]
    return max((math.prod(m.shape) for m in metas), default=0)


def _again(start: Program, paths: Collection[Path], device: Device, mode: str) -> Iterator[tuple[Request, Patch]]:
    """The requests at the ends of `paths`, with what the template coder writes."""
    coder = TemplateCoder()
    context = Context(device, coder, mode)
    programs: dict[Path, Program | None] = {(): start}

    def step(path: Path) -> tuple[Request, Patch] | None:
        program = after(path[:-1])
        if program is None:
            return None
        request = Request(program, path[-1], device, mode)
        try:
            check_action(program, path[-1], context)
            return request, coder.write(request)
        except (CoderError, IllegalAction):
            return None

    def after(path: Path) -> Program | None:
        if path not in programs:
            found = step(path)
            programs[path] = found[1].apply(found[0].program) if found else None
        return programs[path]

    for path in paths:
        found = step(path)
        if found is not None and found[1].alternatives:
            yield found[0], replace(found[1], alternatives=found[1].alternatives[:1])


__all__ = ["Path", "other_sizes", "resized"]
