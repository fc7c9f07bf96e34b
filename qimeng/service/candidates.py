"""From a stranger's text to a program of the library: one region, which the text computes.

A candidate is a function `entry` of the inputs of `forward`, in order, then the parameters, then the buffers that the
computation uses, in the order of `named_parameters` and `named_buffers`. It returns a tuple: the outputs, then the
buffers that a call updates. Buffers that `prepare` makes come after the others; its arguments are called as those of
`entry`. Deals in text and in the order of arguments; runs nothing of the candidate's.
"""

from __future__ import annotations

import ast

from qimeng.coder.llm.names import renamed
from qimeng.coder.llm.shown import ENTRY, PREPARE
from qimeng.coder.llm.source import implementation_of
from qimeng.graph.opgraph import OpGraph, Value
from qimeng.graph.region import Region, merge
from qimeng.program.program import Program
from qimeng.service.messages import Candidate, Form
from qimeng.service.model_class import Original, Untranslated, as_function
from qimeng.spec import KernelSpec
from qimeng.spec.origin import SourceOrigin, init_arguments

FUNCTION, MODEL = "entry", "ModelNew"
"""What a candidate defines: a function, or KernelBench's class."""
_OWN_ENTRY = "candidate_entry"


class NoProgram(Exception):
    """A candidate's text is no program for this reference; the message says what to change.

    Attributes:
        failure: class of the failure.
    """

    def __init__(self, message: str, failure: str = "coder"):
        super().__init__(message)
        self.failure = failure


def program_of(candidate: Candidate, graph: OpGraph, spec: KernelSpec) -> Program:
    """The candidate as a program of one region.

    Args:
        candidate: what was sent.
        graph: of the reference.
        spec: of the reference.

    Raises:
        NoProgram: it is none.
        ChatError: the text lacks something, or imports what no kernel needs.
        SyntaxError: it is no Python.
    """
    program = Program.start(graph)
    if len(program.regions) > 1:
        program = program.with_regions(merge(program.regions, [r.id for r in program.regions]))
    if len(program.regions) != 1:
        raise NoProgram("the reference computes nothing that a kernel could", "unsupported")
    region = program.regions[0]
    text = candidate.source.replace("\r\n", "\n")
    if "\0" in text:
        raise NoProgram("the text holds a zero byte")
    form = candidate.form
    if form is Form.AUTO:
        form = Form.MODEL if _defines(text, MODEL) else Form.PROGRAM
    if form is Form.MODEL:
        text = _as_function(text, graph, region, spec)
    return program.with_implementation(region.id, implementation_of(_as_region(text, graph, region), region))


def arguments_of(graph: OpGraph, region: Region) -> list[Value]:
    """The inputs of `region`, which is all of `graph`, in the order in which a candidate takes them."""
    order = {name: number for number, name in enumerate(graph.nodes)}

    def place(value: Value) -> tuple[bool, int]:
        return graph.nodes[value.node].kind in ("parameter", "buffer"), order[value.node]

    return sorted(region.inputs, key=place)


def results_of(graph: OpGraph, region: Region) -> list[Value]:
    """The outputs of `region` in the order in which a candidate returns them."""
    return [value for value in graph.results() if value in region.outputs]


def _as_region(text: str, graph: OpGraph, region: Region) -> str:
    """`text` with a function in the region's order of arguments and results, which calls the candidate's `entry`."""
    functions = {s.name: s for s in ast.parse(text).body if isinstance(s, ast.FunctionDef)}
    if FUNCTION not in functions:
        raise NoProgram(f"the text defines neither a function `{FUNCTION}` nor a class `{MODEL}`")
    given, results = arguments_of(graph, region), results_of(graph, region)
    arguments = functions[FUNCTION].args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    said = ", ".join(_said(graph, value) for value in given)
    if arguments.vararg or arguments.kwonlyargs or len(names) < len(given):
        raise NoProgram(f"`{FUNCTION}` takes {len(names)} arguments; this reference has {len(given)}: {said}")
    if len(names) > len(given) and PREPARE not in functions:
        raise NoProgram(
            f"`{FUNCTION}` takes {len(names)} arguments, this reference has {len(given)} ({said}), and there is no "
            f"`{PREPARE}` that makes more"
        )
    name_of = dict(zip(given, names, strict=False))
    own = [name_of[value] for value in region.inputs]
    call = f"{_OWN_ENTRY}({', '.join(names)})"
    order = [results.index(value) for value in region.outputs]
    body = [f"    return {call}"]
    if order != list(range(len(order))):
        body = [f"    found = {call}", f"    return ({', '.join(f'found[{i}]' for i in order)},)"]
    head = f"def {ENTRY}({', '.join([*own, *names[len(given) :]])}):"
    return "\n".join([renamed(text, {FUNCTION: _OWN_ENTRY}).rstrip(), "", "", head, *body, ""])


def _as_function(text: str, graph: OpGraph, region: Region, spec: KernelSpec) -> str:
    """The text of a class `ModelNew` with a function `entry` that makes it of its arguments and calls it."""
    flat = not graph.in_spec.parts or all(part.kind == "leaf" for part in graph.in_spec.parts[0].parts)
    if graph.mutations or not flat or graph.out_spec.kind not in ("leaf", "tuple", "list"):
        raise NoProgram(
            f"a {MODEL} is judged where `forward` takes tensors, returns tensors and updates no buffer; for this "
            f"reference, write a function `{FUNCTION}`",
            "unsupported",
        )
    assert isinstance(spec.origin, SourceOrigin)
    given = arguments_of(graph, region)
    names = [f"given{number}" for number in range(len(given))]
    nodes = [graph.nodes[value.node] for value in given]
    state = {n.target: name for n, name in zip(nodes, names, strict=True) if n.kind in ("parameter", "buffer")}
    at = {n.target: name for n, name in zip(nodes, names, strict=True) if n.target not in state}
    inputs = [at.get(str(number), repr(graph.scalars.get(number))) for number in range(graph.n_inputs)]
    space = spec.origin.namespace
    arguments, keywords = init_arguments(space.Model, space.get_init_inputs())
    module = spec.module("cpu")
    single = graph.out_spec.kind == "leaf"
    try:
        return as_function(text, MODEL, FUNCTION, names, Original(module, arguments, keywords, state, inputs, single))
    except Untranslated as error:
        raise NoProgram(f"{MODEL}: {error}", "unsupported") from None


def _said(graph: OpGraph, value: Value) -> str:
    node = graph.nodes[value.node]
    return node.target if node.kind in ("parameter", "buffer") else f"input {node.target}"


def _defines(text: str, name: str) -> bool:
    return any(isinstance(s, ast.ClassDef) and s.name == name for s in ast.parse(text).body)


__all__ = ["FUNCTION", "MODEL", "NoProgram", "arguments_of", "program_of", "results_of"]
