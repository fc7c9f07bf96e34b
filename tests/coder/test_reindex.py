"""Values read at computed positions: what is substituted, what is guarded, what is refused."""

from __future__ import annotations

import torch
from torch.nn import functional

from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.nest.expr import affine, guard, positions
from qimeng.coder.template.nest.ir import Nest
from qimeng.coder.template.rules.builder import Builder
from qimeng.coder.template.rules.regions import region_nest
from qimeng.coder.template.rules.reindex import index, integer
from qimeng.device import device_named
from qimeng.graph.capture import capture
from qimeng.graph.region import Region, make_region
from qimeng.interfaces import Action, Request
from qimeng.program.program import Program


def whole(function, *inputs) -> Region:
    """All operators of `function` as one region."""

    class Model(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    graph = capture(Model, lambda: inputs)
    return make_region(graph, [n.name for n in graph.ops()])


def nest_of(function, *inputs) -> Nest:
    return region_nest(whole(function, *inputs))[1]


def refusal(function, *inputs) -> str | None:
    return TemplateCoder().can_implement(whole(function, *inputs))


def test_a_slice_of_a_result_is_a_shifted_read():
    nest = nest_of(lambda x: x.exp()[:, 2:7:2] + 1, torch.empty(4, 8))
    (load,) = [e for e in nest.exprs if e.op == "load"]
    assert guard(load) is None
    ((position, step),) = positions(load)
    assert (step, sorted(affine(nest.axes, position).values())) == (1, [2])
    assert sorted(nest.walked_strides(load).values()) == [2, 8]


def test_slices_of_slices_and_two_flips_are_one_read():
    nest = nest_of(lambda x: x.exp().flip(1)[:, 1:].flip(1) + 1, torch.empty(4, 8))
    (load,) = [e for e in nest.exprs if e.op == "load"]
    ((position, step),) = positions(load)
    assert (step, list(affine(nest.axes, position).values())) == (1, [1])


def test_each_part_of_a_join_is_read_where_it_is_wanted_only():
    nest = nest_of(lambda x, y: torch.cat([x.exp(), y.sin()], 1), torch.empty(4, 3), torch.empty(4, 5))
    loads = [e for e in nest.exprs if e.op == "load"]
    assert len(loads) == 2 and all(guard(e) is not None for e in loads)


def test_what_an_index_takes_is_within_the_tensor_or_not_read():
    nest = nest_of(lambda x, i: x.exp()[i], torch.empty(9, 4), torch.zeros(5, dtype=torch.int64))
    load = next(e for e in nest.exprs if e.access)
    assert guard(load) is not None and affine(nest.axes, positions(load)[0][0]) is None


def test_outputs_over_different_parts_are_not_one_kernel():
    def pieces(x):
        y = x.exp()
        return y[:, :32] + 1, y[:, 32:].contiguous() * 2, y

    assert "different parts" in refusal(pieces, torch.empty(64, 64))
    assert refusal(lambda x: pieces(x)[0], torch.empty(64, 64)) is None


def test_a_part_of_a_softmax_along_its_own_axis_stays_apart():
    assert refusal(lambda x: x.softmax(1)[:, 3:9] + 1, torch.empty(64, 64)) is not None
    assert refusal(lambda x: x.softmax(1)[3:9] + 1, torch.empty(64, 64)) is None


def test_affine_positions_know_their_coefficients():
    b = Builder()
    rows, columns = b.axes.new(6), b.axes.new(4)
    both = integer(b, "add", integer(b, "mul", index(b, rows), 3), index(b, columns))
    assert affine(b.axes, integer(b, "sub", 10, both)) == {rows[0]: -3, columns[0]: -1}
    assert affine(b.axes, integer(b, "idiv", both, 2)) is None


def test_an_index_into_a_table_beyond_31_bits_has_wide_offsets():
    region = whole(
        lambda w, i: functional.embedding(i, w).exp(),
        torch.empty(70_000, 32_768, device="meta"),
        torch.empty(5, dtype=torch.int64, device="meta"),
    )
    program = Program.start(region.graph)
    patch = TemplateCoder().write(Request(program, Action("lowering", (program.regions[0].id,)), device_named("h200")))
    assert "tl.int64" in patch.alternatives[0].source
