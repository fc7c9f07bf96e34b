"""A region cut out of a graph keeps its identity and computes the same."""

from __future__ import annotations

import pytest
import torch

from qimeng.errors import IllegalAction
from qimeng.graph.cut import cut
from qimeng.graph.rewrites import find_rewrites
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


class Net(torch.nn.Module):
    """Layers with parameters and buffers, an operator of two outputs, a comparison that decides on a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(8, 12), torch.nn.BatchNorm1d(12), torch.nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.relu(self.norm(self.first(x)))
        top, at = torch.max(self.second(h), -1)
        return top * 2 + h.sum(-1), at


def net() -> KernelSpec:
    torch.manual_seed(0)
    return KernelSpec.from_module(Net().eval(), (torch.randn(6, 8),))


def test_a_cut_region_has_the_same_id_and_signature() -> None:
    program = Program.start(capture_spec(net()))
    for region in program.regions:
        found = cut(region)
        assert (found.region.id, found.region.signature) == (region.id, region.signature)
        assert found.graph.n_inputs == len(found.inputs)
        assert Program(found.graph, found.regions).load().Model is not None


def test_equal_regions_that_are_read_otherwise_have_cuts_of_different_identity() -> None:
    def decided(x: torch.Tensor) -> torch.Tensor:
        return torch.argmax(torch.tanh(x), -1)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2

    inputs = (torch.randn(4, 4),)
    regions = [Program.start(capture_spec(KernelSpec.from_function(f, inputs))).regions[0] for f in (decided, plain)]
    cuts = [Program(c.graph, c.regions).digest for c in map(cut, regions)]
    assert regions[0].signature != regions[1].signature and cuts[0] != cuts[1]


def test_what_is_computed_once_comes_along() -> None:
    program = Program.start(capture_spec(net()))
    rewrites, _ = find_rewrites(program.graph, "fold")
    assert rewrites
    program = program.with_rewrites(rewrites)
    reads = [
        r
        for r in program.called
        if any(program.is_settled(o) for o in program.regions if set(o.outputs) & set(r.inputs))
    ]
    assert reads
    for region in reads:
        found = cut(region)
        alone = Program(found.graph, found.regions)
        assert [alone.is_settled(r) for r in found.regions] == [True, False]
        assert found.region.signature == region.signature
        assert "_settled(" in alone.source


def test_a_region_that_reads_no_input_cannot_be_cut_out() -> None:
    def constant(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(4).exp()

    program = Program.start(capture_spec(KernelSpec.from_function(constant, (torch.randn(4),))))
    with pytest.raises(IllegalAction, match="nothing that depends on the inputs"):
        cut(program.regions[0])
