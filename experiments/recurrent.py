"""Generated recurrent layers beside PyTorch's own on a GPU: which cuts are right, and how fast each is.

``python -m experiments.recurrent`` prints a JSON row for each layer and schedule: milliseconds of the whole program
with that loop (its other products on PyTorch), of PyTorch's own layer, and the largest errors of both against float64.
Needs a GPU. The figures of the recurrent family's defaults are to be chosen from these rows
(`qimeng.coder.template.families.recurrent.defaults`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from qimeng.bench.environment import environment
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import current_device
from qimeng.family import covering, refusal
from qimeng.graph.capture import capture
from qimeng.graph.rewrites import find_rewrites
from qimeng.program.program import Program


class ByHand(nn.Module):
    """A recurrent network as a Python loop over its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(1024 + 256, 256), nn.Linear(256, 128)

    def forward(self, x: Tensor) -> Tensor:
        """Inputs of all steps, steps first."""
        state, found = torch.zeros_like(x[0, :, :256]), []
        for step in x:
            state = torch.tanh(self.into(torch.cat((step, state), 1)))
            found.append(self.out(state))
        return torch.stack(found)


class Selective(nn.Module):
    """A selective scan as a Python loop over positions, as `transformers` has it where no kernel is installed."""

    def forward(self, decay: Tensor, given: Tensor, read: Tensor) -> Tensor:
        """Decays and what is added, [batch, channels, positions, states]; what is read, [batch, positions, states]."""
        state, found = torch.zeros_like(given[:, :, 0]), []
        for t in range(given.shape[2]):
            state = decay[:, :, t, :] * state + given[:, :, t, :]
            found.append(torch.matmul(state, read[:, t, :].unsqueeze(-1))[:, :, 0])
        return torch.stack(found, -1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "lstm": (lambda: nn.LSTM(128, 256, batch_first=True), ((10, 512, 128),)),
    "a stack of lstm": (lambda: nn.LSTM(128, 256, 6, batch_first=True), ((10, 512, 128),)),
    "a stack of gru": (lambda: nn.GRU(128, 256, 6), ((512, 10, 128),)),
    "gru both ways": (lambda: nn.GRU(128, 256, 6, bidirectional=True), ((512, 10, 128),)),
    "rnn": (lambda: nn.RNN(1024, 256), ((256, 8, 1024),)),
    "by hand": (ByHand, ((256, 8, 1024),)),
    "selective scan": (Selective, ((1, 1536, 128, 16), (1, 1536, 128, 16), (1, 128, 16))),
    "large lstm": (lambda: nn.LSTM(512, 1024), ((128, 64, 512),)),
}
"""Layers and the shapes of their inputs."""

SECONDS = 90.0
"""Of a run, shared out evenly among layers; after its share, no further schedule of a layer begins."""


def rows(names: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each schedule of each layer named, of all without names."""
    from triton.testing import do_bench

    device, coder, began = current_device(), TemplateCoder(), time.monotonic()
    if device is None:
        raise SystemExit("experiments.recurrent needs a GPU")
    bench, where = partial(do_bench, warmup=20, rep=120), asdict(environment(device))
    chosen = names or list(LAYERS)
    for number, name in enumerate(chosen, 1):
        make, shapes = LAYERS[name]
        torch.manual_seed(0)
        layer, inputs = make().cuda(), tuple(torch.rand(s, device="cuda") for s in shapes)
        exact = _tensors(make_double(make, layer)(*(x.double() for x in inputs)))
        own = _error(layer(*inputs), exact)
        graph = capture(make, lambda shapes=shapes: tuple(torch.empty(s) for s in shapes))  # type: ignore[misc]
        start = Program.start(graph).with_rewrites(find_rewrites(graph, "layers")[0])
        regions = [r for r in start.regions if covers(r)]
        family, plan = covering(regions[-1])
        first = family.default(plan, device, "default")
        found = [first, *others(family, plan, first, device), *family.guesses(plan, first, device, "default")]
        known = {"case": name, "eager_ms": bench(partial(layer, *inputs)), "eager_error": own, "environment": where}
        for schedule in dict.fromkeys(s for s in found if refusal(family, plan, s, device) is None):
            if time.monotonic() - began > SECONDS * number / len(chosen):
                break
            row = {**known, "schedule": str(schedule)}
            try:
                program = start
                for region in regions:
                    program = program.with_implementation(region.id, coder.print(region, schedule))
                model = program.load().Model().cuda()
                model.load_state_dict(layer.state_dict())
                errors = [_error(model(*inputs), exact) for _ in range(3)]
                yield {**row, "ms": bench(partial(model, *inputs)), "error": max(errors), "loops": len(regions)}
            except Exception as failure:  # noqa: BLE001 - a schedule that does not compile is a row like any other
                yield {**row, "failed": str(failure).splitlines()[0][:300]}


def others(family: Any, plan: Any, first: Any, device: Any) -> list[Any]:
    """The first cut in other ways: what programs wait for, and what tensor cores take."""
    waits = family.moves["pipeline"].schedules(plan, first, "stages", device) if plan.exchanged else []
    return [*waits, first.but(precision="tf32")] if first.dot else waits


def make_double(make: Callable[[], nn.Module], layer: nn.Module) -> nn.Module:
    """The layer in float64, with the same parameters."""
    twin = make().cuda()
    twin.load_state_dict(layer.state_dict())
    return twin.double()


def covers(region: Any) -> bool:
    """Whether the region is a loop over steps."""
    return "recurrence" in region.label()


def _tensors(found: Any) -> list[Tensor]:
    return list(_pytree.tree_leaves(found))


def _error(found: Any, exact: list[Tensor]) -> float:
    pairs = zip(_tensors(found), exact, strict=True)
    return max(float((a.double() - b).abs().max()) for a, b in pairs)


if __name__ == "__main__":
    with torch.no_grad():
        for found_row in rows(sys.argv[1:]):
            print(json.dumps(found_row), flush=True)
