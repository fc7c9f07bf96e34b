"""A program is what it computes, how it is divided and by what each part is computed; never how it is printed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.errors import IllegalAction
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, map_values
from qimeng.graph.region import Region, merge, split
from qimeng.graph.structure import Structure, structure_of
from qimeng.interfaces import Patch
from qimeng.program import identity
from qimeng.program.content import digest_of
from qimeng.program.implementation import schedule_content
from qimeng.program.program import Implementation, Program, torch_implementation
from qimeng.program.schedule import Schedule, family_field
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.spec.call import Call
from qimeng.testing import fake_kernel, sample_graph
from tests.properties import PROPERTY

META = Meta((4, 8), (8, 1), "float32")


def _spec(args: tuple[Any, ...]) -> Structure:
    return structure_of(torch.utils._pytree.tree_structure((args, {})))


def small() -> OpGraph:
    """``relu(x) * 2 + w``, made by hand, so that no version of PyTorch changes it."""
    nodes = [
        Node("x", "input", "0", metas=(META,)),
        Node("w", "parameter", "w", metas=(META,)),
        Node("two", "constant", "", metas=(Meta((), (), "float32"),), literal=2.0),
        Node("relu", "op", "aten.relu.default", (Value("x"),), metas=(META,)),
        Node("mul", "op", "aten.mul.Tensor", (Value("relu"), Value("two")), metas=(META,)),
        Node("add", "op", "aten.add.Tensor", (Value("mul"), Value("w")), (("alpha", 1),), (META,)),
    ]
    call = Call(("x",))
    return OpGraph({n.name: n for n in nodes}, (Value("add"),), (), _spec((0,)), Structure(), {}, 1, None, call)


def lowered(graph: OpGraph) -> Program:
    """The small graph as two regions, one of them generated."""
    program = Program.start(graph)
    program = program.with_regions(merge(program.regions, [program.regions[0].id, program.regions[1].id]))
    region = program.regions[0]
    return program.with_implementation(region.id, TemplateCoder().print(region, TileSchedule(warps=2)))


def test_digests_are_what_they_were() -> None:
    """Stores, trees and recipes hold them. If this fails for a reason, raise `IDENTITY`: what is stored is renamed."""
    assert Program.start(small()).digest == "3515c7d44ce3d824"
    written = Implementation("triton", "def f(x): ...\n", "f", schedule=TileSchedule(warps=2, block_p=4))
    assert written.digest == "215afe58b47f9f7d"
    assert digest_of("a", 1, 1.0, True, None, (2, [3]), {"k": Meta((2,), (1,), "float32")}) == "357830431fe17ba2"


# ---- what is no part of it


@pytest.mark.parametrize("name", ["HEADER", "RUNTIME", "STATE_CHANGES"])
def test_the_text_of_the_file_is_no_part_of_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from qimeng.program import emit

    before = lowered(small())
    old = getattr(emit, name)
    changed = [*old, "    # a comment"] if isinstance(old, list) else f"{old}\n# a comment\n"
    digest, source = before.digest, before.source
    monkeypatch.setattr(emit, name, changed)
    after = lowered(small())
    assert after.source != source and after.digest == digest


def test_what_is_kept_between_programs_changes_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of one search share the texts of their regions: a step makes those anew that it changes."""
    made: list[str] = []
    content = identity.implementation_content

    def counted(region: Region, implementation: Implementation) -> Any:
        made.append(region.id)
        return content(region, implementation)

    def graph() -> OpGraph:
        return capture_spec(KernelSpec.of(lambda x: torch.softmax(torch.relu(x) * 0.731 + 1, -1), (torch.ones(3, 7),)))

    monkeypatch.setattr(identity, "implementation_content", counted)
    start = Program.start(graph())  # regions that no other test has, whose texts would be there
    assert start.digest and len(made) == len(start.regions)
    region = start.called[-1]
    kernel = fake_kernel(region, None)
    lowered = start.with_implementation(region.id, kernel)
    assert lowered.digest != start.digest and made[len(start.regions) :] == [region.id]
    fresh = Program.start(graph())
    assert fresh.with_implementation(fresh.called[-1].id, kernel).digest == lowered.digest


def test_how_a_region_reads_as_pytorch_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = lowered(small())
    names = before.implementation(before.regions[0]).entry
    digest, text = before.digest, Region._after_name.func  # type: ignore[attr-defined]
    monkeypatch.setattr(Region, "_after_name", property(lambda self: text(self) + "    # a comment\n"))
    after = lowered(small())
    assert after.implementation(after.regions[0]).entry != names, "kernels are named after the region's signature"
    assert after.digest == digest


def test_a_fallback_is_its_code() -> None:
    def program(text: str) -> Program:
        return Program(OpGraph({}, ()), (), {}, text)

    first = program('"""A file."""\n\n\nclass Model:\n    """Computes."""\n\n    x = 1  # one\n').digest
    assert program("class Model:\n    x = (1)\n").digest == first
    assert program("class Model:\n    x = 2\n").digest != first
    assert program("no python (").digest != program("no python )").digest
    assert first != Program.start(small()).digest


@settings(PROPERTY, max_examples=25)
@given(st.permutations(range(6)))
def test_names_of_nodes_are_no_part_of_it(order: list[int]) -> None:
    graph = small()
    name = {old: f"n{order[i]}" for i, old in enumerate(graph.nodes)}

    def moved(tree: Any) -> Any:
        return map_values(tree, lambda v: Value(name[v.node], v.port))

    nodes = {
        name[n.name]: replace(n, name=name[n.name], args=moved(n.args), kwargs=moved(n.kwargs))
        for n in graph.nodes.values()
    }
    other = replace(graph, nodes=nodes, outputs=moved(graph.outputs))
    assert Program.start(other).digest == Program.start(graph).digest


@cache
def plain_start() -> Program:
    return Program.start(sample_graph())


@settings(PROPERTY, max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(["fuse", "split", "write"]), st.integers(0, 9), st.integers(0, 9)), max_size=8)
)
def test_programs_that_are_equal_have_equal_digests_whatever_led_to_them(
    way: list[tuple[str, int, int]],
) -> None:
    """Random ways through fusions, splits and implementations: digests agree exactly where programs do."""
    program, reached = plain_start(), {plain_start().digest: content(plain_start())}
    for kind, i, j in way:
        regions = program.regions
        one, other = regions[i % len(regions)], regions[j % len(regions)]
        try:
            if kind == "fuse":
                program = program.with_regions(merge(regions, [one.id, other.id]))
            elif kind == "split":
                program = program.with_regions(split(regions, one.id))
            else:
                written = fake_kernel(one, TileSchedule(warps=1 + j)) if j % 3 else torch_implementation(one)
                program = program.with_implementation(one.id, written)
        except IllegalAction:
            continue
        assert reached.setdefault(program.digest, content(program)) == content(program)
    assert len({digest for digest in reached}) == len(set(map(repr, reached.values())))
    again = Program(program.graph, program.regions, dict(reversed(program.implementations.items())))
    assert again.digest == program.digest, "the order in which implementations came is none of a program's"


def content(program: Program) -> list[Any]:
    return [(r.nodes, r.outputs, program.implementation(r)) for r in program.regions]


def test_pytorch_by_name_is_pytorch_by_default() -> None:
    program = Program.start(small())
    region = program.regions[0]
    assert program.with_implementation(region.id, torch_implementation(region)).digest == program.digest


def test_what_is_not_used_is_no_part_of_it() -> None:
    program = lowered(small())
    stray = Implementation("triton", "def f(): ...\n", "f")
    assert replace(program, implementations={**program.implementations, "stray": stray}).digest == program.digest


# ---- what is part of it


def with_node(name: str, **changes: Any) -> Callable[[OpGraph], OpGraph]:
    return lambda graph: replace(graph, nodes={**graph.nodes, name: replace(graph.nodes[name], **changes)})


CHANGES: dict[str, Callable[[OpGraph], OpGraph]] = {
    "operator": with_node("relu", target="aten.sigmoid.default"),
    "attribute": with_node("add", kwargs=(("alpha", 2),)),
    "type of an attribute": with_node("add", kwargs=(("alpha", 1.0),)),
    "truth of an attribute": with_node("add", kwargs=(("alpha", True),)),
    "operands": with_node("add", args=(Value("w"), Value("mul"))),
    "constant": with_node("two", literal=3.0),
    "sign of zero": with_node("two", literal=-0.0),
    "shape": with_node("relu", metas=(Meta((8, 4), (4, 1), "float32"),)),
    "stride": with_node("relu", metas=(Meta((4, 8), (1, 4), "float32"),)),
    "dtype": with_node("relu", metas=(Meta((4, 8), (8, 1), "bfloat16"),)),
    "key of a parameter": with_node("w", target="v"),
    "parameter or buffer": with_node("w", kind="buffer"),
    "outputs": lambda g: replace(g, outputs=(Value("add"), Value("mul"))),
    "plain output": lambda g: replace(g, outputs=(Value("add"), 1)),
    "mutation": lambda g: replace(g, mutations=(("w", Value("add")),)),
    "structure of outputs": lambda g: replace(g, out_spec=Structure("list", parts=(Structure(),))),
    "scalars": lambda g: replace(g, scalars={1: 2}),
    "inputs": lambda g: replace(g, n_inputs=2),
    "structure of inputs": lambda g: replace(g, in_spec=_spec(({"k": 0},))),
    "mode": lambda g: replace(g, training=False),
    "call": lambda g: replace(g, call=Call(("y",))),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_graph_is_another_program(name: str) -> None:
    graph = small()
    assert Program.start(CHANGES[name](graph)).digest != Program.start(graph).digest
    zero = with_node("two", literal=0.0)(graph)
    assert Program.start(zero).digest != Program.start(CHANGES["sign of zero"](graph)).digest


IMPLEMENTATION = {
    "language": "cuda",
    "source": "def f(x): # another\n    return (x,)\n",
    "entry": "g",
    "prepare": "p",
    "prepare_inputs": (0,),
    "schedule": TileSchedule(warps=8),
}


@pytest.mark.parametrize("name", IMPLEMENTATION)
def test_a_change_of_an_implementation_is_another_program_and_another_patch(name: str) -> None:
    program = Program.start(small())
    region = program.regions[0]
    first = Implementation("triton", "def f(x):\n    return (x,)\n", "f", schedule=TileSchedule())
    other = replace(first, **{name: IMPLEMENTATION[name]})  # type: ignore[arg-type]
    assert first.digest != other.digest
    one, two = (program.with_implementation(region.id, i) for i in (first, other))
    assert len({one.digest, two.digest, program.digest}) == 3
    patches = [Patch(target=region.id, alternatives=(i,)) for i in (first, other)]
    assert patches[0].digest() != patches[1].digest()


@given(st.lists(st.sampled_from(["SIGNATURE", "HALF", "\0whole\0", "\0half\0", "\0", "x"]), max_size=4), st.data())
@settings(PROPERTY, max_examples=60)
def test_two_texts_never_become_one(words: list[str], data: st.DataObject) -> None:
    """Names made from a signature are left out, and nothing that an author may write stands for them."""
    program = Program.start(small())
    region = program.regions[0]
    table = {"SIGNATURE": region.signature, "HALF": region.signature[:8]}

    def digest(parts: list[str]) -> tuple[str, str]:
        text = "#" + "".join(table.get(w, w) for w in parts)
        return text, program.with_implementation(region.id, Implementation("triton", text, "f")).digest

    one = digest(words)
    two = digest(data.draw(st.permutations(words)))
    three = digest([{"SIGNATURE": "\0whole\0", "HALF": "\0half\0"}.get(w, w) for w in words])
    assert (one[0] == two[0]) == (one[1] == two[1]) and (one[0] == three[0]) == (one[1] == three[1])


def test_the_partition_is_part_of_it() -> None:
    program = Program.start(small())
    fused = program.with_regions(merge(program.regions, [r.id for r in program.regions[:2]]))
    assert fused.digest != program.digest
    assert program.with_regions(split(fused.regions, fused.regions[0].id)).digest == program.digest


def test_no_field_is_forgotten() -> None:
    """Whoever adds one says in `qimeng.program.identity` whether it is part of a program."""
    assert [f.name for f in fields(Program)] == [
        "graph", "regions", "implementations", "fallback", "captured", "rewrites", "launch",
    ]  # fmt: skip
    assert {f.name for f in fields(Implementation)} == set(IMPLEMENTATION)
    assert [f.name for f in fields(Region)] == ["graph", "nodes", "outputs"]
    assert [f.name for f in fields(Node)] == ["name", "kind", "target", "args", "kwargs", "metas", "literal"]
    assert [f.name for f in fields(OpGraph)] == [
        "nodes", "outputs", "mutations", "in_spec", "out_spec", "scalars", "n_inputs", "training", "call",
        "settles", "deterministic", "around", "shares",
    ]  # fmt: skip


# ---- hashes of plain data


def test_a_schedule_is_its_family_and_what_is_unusual_in_it() -> None:
    """A new field with a default, another order of the fields and another name of the class change no hash."""

    @dataclass(frozen=True)
    class Another(Schedule):
        family: str = family_field("tile")
        unheard_of: int = 3
        warps: int = 4
        block_p: int = 1

    one, two = TileSchedule(warps=2, block_p=4), Another(warps=2, block_p=4)
    assert schedule_content(one) == schedule_content(two) == ["tile", [["block_p", 4], ["warps", 2]]]
    assert schedule_content(TileSchedule(warps=8)) != schedule_content(TileSchedule(warps=2))


def test_types_count() -> None:
    different = [
        1,
        1.0,
        True,
        "1",
        None,
        (1,),
        ((1,),),
        {1: 1},
        {"1": 1},
        "None",
        0.0,
        -0.0,
        torch.float32,
        "torch.float32",
    ]
    assert len({digest_of(item) for item in different}) == len(different)
    assert digest_of([1, 2]) == digest_of((1, 2)) and digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of(float("nan")) == digest_of(float("nan"))


def test_what_says_where_it_is_in_memory_has_no_hash() -> None:
    with pytest.raises(TypeError, match="only plain data"):
        digest_of(object())
