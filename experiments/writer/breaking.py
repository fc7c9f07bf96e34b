"""Right code broken by one small change, as models break it.

Deals in Python text, and in the CUDA C++ within it. Whether a change really breaks the code is for the gates to say.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

_OTHER_NAMES = {
    "tl.load": "tl.read",
    "tl.store": "tl.write",
    "tl.arange": "tl.range_of",
    "tl.program_id": "tl.program",
    "tl.maximum": "tl.max2",
    "tl.exp": "tl.exponential",
    "tl.sum": "tl.reduce_sum",
    "tl.dot": "tl.matmul",
    "torch.empty_strided": "torch.empty_with_strides",
    "blockIdx.x": "blockIndex.x",
    "blockDim.x": "blockSize.x",
    "static_cast<": "cast_to<",
    "cuda_kernel(": "cuda_function(",
}
"""Functions, and what a model may take for their names."""

_ASSIGNED = re.compile(r"^(    +)(?:const \w+ )?(\w+) = .*$", re.M)
_KEYWORD = re.compile(r"\b([A-Z][A-Z_0-9]*)=(\d+)")
_LAUNCH = re.compile(r"^    +\w+\[.*\]\(.*\)$", re.M)

Change = Callable[[str, random.Random], str | None]
"""From code to broken code; None where there is nothing to change."""


def unbalanced(text: str, rng: random.Random) -> str | None:
    """One closing bracket is missing."""
    places = [found.start() for found in re.finditer(r"[)\]]", text)]
    if not places:
        return None
    place = rng.choice(places)
    return text[:place] + text[place + 1 :]


def cut(text: str, rng: random.Random) -> str | None:
    """The last lines are missing."""
    lines = text.splitlines(True)
    if len(lines) < 4:
        return None
    return "".join(lines[: rng.randint(len(lines) // 2, len(lines) - 2)])


def misspelt(text: str, rng: random.Random) -> str | None:
    """A variable is called differently where it is used."""
    names = [found[2] for found in _ASSIGNED.finditer(text)]
    uses = [u for name in dict.fromkeys(names) for u in list(re.finditer(rf"\b{name}\b", text))[1:]]
    if not uses:
        return None
    use = rng.choice(uses)
    return f"{text[: use.end()]}_{rng.choice(('0', 'tile', 'val'))}{text[use.end() :]}"


def left_out(text: str, rng: random.Random) -> str | None:
    """A variable is never computed."""
    found = list(_ASSIGNED.finditer(text))
    if not found:
        return None
    one = rng.choice(found)
    return text[: one.start()] + text[one.end() + 1 :]


def unknown(text: str, rng: random.Random) -> str | None:
    """A function has a name that the language does not know."""
    known = [name for name in _OTHER_NAMES if name in text]
    if not known:
        return None
    name = rng.choice(known)
    return text.replace(name, _OTHER_NAMES[name])


def odd_block(text: str, rng: random.Random) -> str | None:
    """A block's extent is no power of two."""
    return _resized(text, rng, lambda size: size * 3)


def too_large(text: str, rng: random.Random) -> str | None:
    """A block is larger than the device or the language allows."""
    return _resized(text, rng, lambda size: size * 4096)


def _resized(text: str, rng: random.Random, size: Callable[[int], int]) -> str | None:
    found = [k for k in _KEYWORD.finditer(text) if int(k[2]) > 1]
    if not found:
        return None
    one = rng.choice(found)
    return text[: one.start(2)] + str(size(int(one[2]))) + text[one.end(2) :]


def not_launched(text: str, rng: random.Random) -> str | None:
    """No kernel is launched."""
    return _LAUNCH.sub(lambda found: re.match(r" *", found[0])[0] + "pass", text) if _LAUNCH.search(text) else None  # type: ignore[index]


def fewer_arguments(text: str, rng: random.Random) -> str | None:
    """A launch lacks its first argument."""
    found = _LAUNCH.search(text)
    if found is None or ", " not in found[0].rpartition("](")[2]:
        return None
    head, middle, tail = found[0].rpartition("](")
    return text[: found.start()] + head + middle + tail.partition(", ")[2] + text[found.end() :]


def synchronized(text: str, rng: random.Random) -> str | None:
    """The host waits for the device, which no region may."""
    place = text.rfind("    return (")
    return None if place < 0 else f"{text[:place]}    torch.cuda.synchronize()\n{text[place:]}"


CHANGES: Mapping[str, Change] = {
    change.__name__: change
    for change in (
        unbalanced,
        cut,
        misspelt,
        left_out,
        unknown,
        odd_block,
        too_large,
        not_launched,
        fewer_arguments,
        synchronized,
    )
}
"""Every change, by name."""


def broken(text: str, rng: random.Random) -> str | None:
    """`text` with one change, drawn evenly from those that apply; None where none does."""
    for name in rng.sample(list(CHANGES), len(CHANGES)):
        found = CHANGES[name](text, rng)
        if found is not None and found != text:
            return found
    return None


__all__ = ["CHANGES", "Change", "broken"]
