"""Copying the nearest patch that is known: what a writer has to be ahead of to have learnt anything.

Deals in traits of requests and in examples. Knows nothing about models or judges.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from experiments.writer.examples import Example
from qimeng.actions import rewritten
from qimeng.coder.llm.chat import Reply
from qimeng.coder.llm.reply import read_reply
from qimeng.coder.llm.shown import target_region
from qimeng.coder.llm.similar import OPERATORS, Traits, alike, similarity, traits_of
from qimeng.errors import CoderError
from qimeng.interfaces import Coder, Patch, Request


class CopyCoder(Coder):
    """Answers with the code of the nearest example it knows; asked again, with the next one.

    Args:
        known: traits and answers of the examples that it copies from.
    """

    def __init__(self, known: Iterable[tuple[Traits, str]]):
        self.known = tuple(known)

    def write(self, request: Request) -> Patch:
        """The patch of the nearest example that can be read for this region.

        Raises:
            CoderError: none can.
        """
        region, wanted = target_region(request), traits_of(request)
        tried = {a.source for a in request.failed.alternatives} if request.failed else set()
        for _, answer in sorted(self.known, key=lambda pair: -similarity(wanted, pair[0])):
            try:
                found = read_reply(Reply(f"```python\n{answer}```"), region)
            except CoderError:
                continue
            if found.source not in tried:
                return rewritten(request, self).patch((found,))
        raise CoderError("no example can be copied")


def worth_copying(known: Iterable[Example], asked: Iterable[Example], count: int) -> Iterator[Example]:
    """Those of `known` that are among the `count` nearest of some example of `asked`, none twice.

    A copier that knows only these answers as one that knows all does, but for ties, and where so many cannot be read:
    what is known may be a million.
    """
    chains: dict[tuple[str, ...], list[Example]] = {}
    for example in known:
        chains.setdefault(example.traits.ops, []).append(example)
    given: set[str] = set()
    for example in asked:
        for found in _nearest(chains, example.traits, count):
            if found.key not in given:
                given.add(found.key)
                yield found


def _nearest(chains: dict[tuple[str, ...], list[Example]], wanted: Traits, count: int) -> list[Example]:
    """The `count` examples most similar to `wanted`; chains that cannot be among them are not looked through."""
    found: list[tuple[float, Example]] = []
    for share, ops in sorted(((alike(wanted.ops, ops), ops) for ops in chains), reverse=True):
        if len(found) == count and OPERATORS * share + (1 - OPERATORS) <= found[-1][0]:
            break
        some = ((similarity(wanted, e.traits), e) for e in chains[ops])
        found = heapq.nlargest(count, [*found, *some], key=lambda pair: pair[0])
    return [e for _, e in found]


__all__ = ["CopyCoder", "worth_copying"]
