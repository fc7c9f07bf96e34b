"""The text of a standalone program file.

Deals in source text: one section a region, then a class `Model` with the reference's parameter names, guards on its
inputs and a straight-line forward. Knows nothing about what the regions compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qimeng.backend.base import Backend
from qimeng.backend.registry import backend_named
from qimeng.graph.opgraph import Meta, Node, OpGraph, Value, row_major
from qimeng.graph.region import Region, literal
from qimeng.graph.state import settled_nodes
from qimeng.program.face import arrange, call_constants, face_runtime, refuse_gradients
from qimeng.program.implementation import Implementation
from qimeng.program.lanes import RUNTIME as LANES
from qimeng.program.lanes import Lanes, lanes_of
from qimeng.program.launch import RUNTIME as LAUNCH
from qimeng.program.launch import STREAMS, launch_call
from qimeng.program.recurrent import recurrent_section
from qimeng.program.runtime import CARRY, DEVICE, HEADER, INTERPRETER, RUNTIME, STATE, STATE_CHANGES
from qimeng.program.settled import Settled, is_settled, settled_section
from qimeng.program.strides import STRIDES, runs_anywhere, uncertain, with_strides

LAZY_VIEWS = ("aten._neg_view", "aten._conj", "aten.conj", "aten.imag")
"""Operators on PyTorch that may yield a view of memory with another sign, or of conjugates."""


def emit_program(graph: OpGraph, parts: Sequence[tuple[Region, Implementation]], launch: str = "") -> str:
    """The file for `parts`, regions with their implementations in topological order.

    Args:
        graph: what is computed.
        parts: what computes it.
        launch: how it is launched (`qimeng.program.launch`); empty for kernel by kernel.
    """
    used = [backend_named(language) for language in dict.fromkeys(i.language for _, i in parts if i.generated)]
    sections: dict[str, str] = {}
    for region, impl in parts:
        sections.setdefault(impl.entry, f"# ---- {region.label()}\n{runs_anywhere(impl).strip()}\n")
    header = HEADER.format(imports=_imports(used), needs="".join(b.program_needs for b in used))
    carry = CARRY if any(n.kind == "buffer" and n.literal is not None for n in graph.nodes.values()) else ""
    lacks = _interpreter_lacks(graph, parts)
    body = (
        "".join(f"{text}\n\n" for b in used if (text := b.program_runtime()))
        + "\n\n".join(sections.values())
        + "\n"
        + RUNTIME
        + (STATE if any(n.kind in ("parameter", "buffer") for n in graph.nodes.values()) else "")
        + face_runtime(graph)
        + (STRIDES if uncertain(parts) else "")
        + (DEVICE if _has_kernels(parts) else "")
        + "".join(b.program_guard for b in used)
        + (INTERPRETER.format(lacks=lacks) if lacks else "")
        + carry
        + recurrent_section(graph)
        + "".join(settled_section(graph, parts))
        + (LAUNCH if launch else "")
        + (LANES if launch == STREAMS else "")
    )
    return header.replace("\n\n\n\n", "\n\n\n") + body + _model(graph, parts, launch)


def _imports(used: Sequence[Backend]) -> str:
    """What the file imports beside torch, each module once, those of Python's own library first."""
    lines = list(dict.fromkeys(line for backend in used for line in backend.program_header().splitlines()))
    return "\n".join(lines)


def _model(graph: OpGraph, parts: Sequence[tuple[Region, Implementation]], launch: str) -> str:
    names: dict[Value, str] = {}
    state, inputs = [], []
    for node in graph.nodes.values():
        if node.kind in ("parameter", "buffer"):
            names[Value(node.name)] = f"state[{node.target!r}]"
            state.append(node)
        elif node.kind in ("input", "scalar"):
            names[Value(node.name)] = f"a{node.target}"
            inputs.append(node)
        elif node.kind == "constant" and node.metas[0] is not None:
            names[Value(node.name)] = (
                f"torch.scalar_tensor({literal(node.literal)}, dtype=torch.{node.metas[0].dtype}, device=device)"
            )
    prepared = [
        (f"prepared[{i}]", region, impl) for i, (region, impl) in enumerate((r, m) for r, m in parts if m.prepare)
    ]
    by_region = {id(region): slot for slot, region, _ in prepared}
    lines = [
        *_structure(graph),
        *call_constants(graph.call),
        *_state(state),
        "",
        f"class Model({'_Recurrent' if recurrent_section(graph) else 'torch.nn.Module'}):",
        "    def __init__(self, *unused):",
        "        super().__init__()",
    ]
    if state:
        lines += ["        for key, facts in _STATE.items():", "            _declare(self, key, *facts)"]
    for node in state:
        if node.literal is not None:
            lines.append(f"        _carry(self, {node.target!r}, *_STATE[{node.target!r}][:3], {node.literal!r})")
    settled = Settled.of(graph, parts)
    functions = [impl.prepare for _, _, impl in prepared] + ([settled.name] if settled else [])
    made = ", ".join(f"_Prepared({function})" for function in functions)
    more = ", _qimeng_state=_State()" if state else ""
    more += ", _qimeng_launch=_Launch()" if launch else ""
    lines.append(f"        vars(self).update(_qimeng_prepared=[{made}], _qimeng_fits=True{more})")
    if graph.training is False:
        lines.append("        self.eval()")
    lines += ["        self._qimeng_flatten()"] if recurrent_section(graph) else []
    lines += STATE_CHANGES if state else []
    lines += ["", "    def forward(self, *args, **kwargs):"]
    lines += [f"        {line}" for line in (*_mode(graph), *arrange(graph.call), *_unpack(graph))]
    if state:
        lines += [
            '        if not vars(self)["_qimeng_fits"]:',
            "            _check_state(self, _STATE)",
            '            vars(self)["_qimeng_fits"] = True',
        ]
    lines += [f"        {line}" for line in (*_guards(graph, inputs), *refuse_gradients(graph))]
    lines += ["        _check_device(device)"] if _has_kernels(parts) else []
    guarded = dict.fromkeys(i.language for _, i in parts if i.generated and backend_named(i.language).program_guard)
    lines += [f"        _check_{language}(device)" for language in guarded]
    lines += ["        _check_interpreter(device)"] if _interpreter_lacks(graph, parts) else []
    compute = ['        prepared = vars(self)["_qimeng_prepared"]'] if functions else []
    unsure = uncertain(parts)
    compute += _settled_call(graph, settled, names, f"prepared[{len(prepared)}]", unsure) if settled else []
    lanes = lanes_of(graph, [region for region, _ in parts]) if launch == STREAMS else None
    compute += _calls(graph, parts, names, by_region, unsure, lanes)
    compute += _mutations(graph, names)
    results = [o for o in graph.outputs if isinstance(o, Value)]
    if launch:
        given = [f"a{n.target}" for n in inputs]
        device = [f"        {line}" for line in _device(graph, inputs)]
        run = ["", f"    def _qimeng_run(self, {', '.join(given)}):", *device, *compute]
        run.append(f"        return ({''.join(f'{names[v]}, ' for v in results)})")
        names |= {v: f"o{i}" for i, v in enumerate(dict.fromkeys(results))}
        updated = list(dict.fromkeys(key for key, _ in graph.mutations))
        lines += [f"        {line}" for line in launch_call(bool(state), updated, given, [names[v] for v in results])]
    else:
        lines, run = lines + compute, []
    out = [names[o] if isinstance(o, Value) else literal(o) for o in graph.outputs]
    lines.append(f"        return {graph.out_spec.text(out)}")
    return "\n".join(lines + run) + "\n"


def _settled_call(
    graph: OpGraph, settled: Settled, names: dict[Value, str], function: str, unsure: set[Value]
) -> list[str]:
    """The lines that get what is computed once; its results are entered into `names`."""
    given = ", ".join(names[v] for v in settled.inputs)
    for v in settled.outputs:
        names[v] = f"t{len(names)}"
    call = f"{', '.join(names[v] for v in settled.outputs)}, = {function}({given})"
    made = any(not region.inputs for region, _ in settled.parts)  # nothing says where to make its tensors
    lines = ["        with device:", f"            {call}"] if made else [f"        {call}"]
    laid_out = [f"        {names[v]} = {with_strides(graph, v, names[v])}" for v in settled.outputs if v in unsure]
    return [*lines, *laid_out]


def _calls(
    graph: OpGraph,
    parts: Sequence[tuple[Region, Implementation]],
    names: dict[Value, str],
    by_region: dict[int, str],
    unsure: set[Value],
    lanes: Lanes | None = None,
) -> list[str]:
    """The lines that compute the regions, on `lanes` or one after the other; their results are entered into `names`.

    What was computed on one stream may be read on another until all have ended, and is kept so long.
    """
    lines = [f"        {lanes.begin()}"] if lanes else []
    last_use = _last_uses(graph, parts)
    held_back = _lazily_read(graph, parts)
    for k, (region, impl) in enumerate(parts):
        if is_settled(graph, region):
            continue
        for v in held_back[k]:
            lines.append(_line(names[v], f"_in_memory({names[v]})", k, lanes))
        arguments = [names[v] for v in region.inputs]
        if impl.prepare:
            packed = ", ".join(names[region.inputs[i]] for i in impl.prepare_inputs)
            arguments.append(f"*{by_region[id(region)]}({packed})")
        targets = []
        for v in region.outputs:
            names[v] = f"t{len(names)}"
            targets.append(names[v])
        call = _line(f"{', '.join(targets)},", f"{impl.entry}({', '.join(arguments)})", k, lanes)
        if all(graph.nodes[v.node].kind == "scalar" for v in region.inputs):  # nothing says where to make its tensors
            lines += ["        with device:", f"    {call}"]
        else:
            lines.append(call)
        lines += [_line(names[v], with_strides(graph, v, names[v]), k, lanes) for v in region.outputs if v in unsure]
        dead = [names[v] for v in last_use.get(k, ())]
        if dead and not lanes:
            lines.append(f"        del {', '.join(dead)}")
    return [*lines, "        lanes.join()"] if lanes else lines


def _line(target: str, text: str, number: int, lanes: Lanes | None) -> str:
    """The line that gives `target` what `text` computes, for the region of that number."""
    return f"        {target} = {lanes.call(number, text) if lanes else text}"


def _has_kernels(parts: Sequence[tuple[Region, Implementation]]) -> bool:
    return any("@triton.jit" in impl.source for _, impl in parts)


def _interpreter_lacks(graph: OpGraph, parts: Sequence[tuple[Region, Implementation]]) -> str:
    """Why Triton's own interpreter does not compute a kernel as a GPU does; empty where it may."""
    kernels = [(region, impl.source) for region, impl in parts if "@triton.jit" in impl.source]
    if any("bfloat16" in text or any(graph.meta(v).dtype == "bfloat16" for v in r.inputs) for r, text in kernels):
        return "computes bfloat16 wrongly"
    return "has no inline assembly" if any("inline_asm" in text for _, text in kernels) else ""


def _state(state: Sequence[Node]) -> list[str]:
    """A constant that holds shape, strides and dtype of every parameter and buffer, and whether it is a parameter."""
    if not state:
        return []
    lines = ["", "_STATE = {"]
    for node in state:
        meta = node.metas[0]
        assert meta is not None
        stride = row_major(meta.shape) if 0 in meta.stride else meta.stride  # a broadcast one cannot be loaded into
        lines.append(f"    {node.target!r}: ({meta.shape}, {stride}, torch.{meta.dtype}, {node.kind == 'parameter'}),")
    return [*lines, "}", ""]


def _mode(graph: OpGraph) -> list[str]:
    """A guard of the mode, where training and evaluation are different computations."""
    if graph.training is None:
        return []
    mine, other = ("training", "evaluation") if graph.training else ("evaluation", "training")
    back, away = ("train()", "eval()") if graph.training else ("eval()", "train()")
    return [
        f"if {'not ' if graph.training else ''}self.training:",
        "    raise ValueError(",
        f'        "made for {mine} mode, and in {other} mode the module computes something else: "',
        f'        "call {back}, or optimize the module again after {away}"',
        "    )",
    ]


def _mutations(graph: OpGraph, names: dict[Value, str]) -> list[str]:
    """Buffer updates, one launch for each dtype; what still needs a buffer's old value gets a copy of it first."""
    changed = {key for key, _ in graph.mutations}
    lines: list[str] = []
    for value in graph.results():
        node = graph.nodes[value.node]
        if node.kind == "buffer" and node.target in changed:
            lines.append(f"        old{len(lines)} = {names[value]}.clone()")
            names[value] = f"old{len(lines) - 1}"
    alike: dict[str, list[tuple[str, str]]] = {}
    for key, value in graph.mutations:
        alike.setdefault(graph.meta(value).dtype, []).append((f"state[{key!r}]", names[value]))
    for pairs in alike.values():
        if len(pairs) == 1:
            lines.append(f"        {pairs[0][0]}.copy_({pairs[0][1]})")
        else:
            buffers, values = (", ".join(part) for part in zip(*pairs, strict=True))
            lines.append(f"        torch._foreach_copy_([{buffers}], [{values}])")
    return lines


def _unpack(graph: OpGraph) -> list[str]:
    flat = ", ".join(f"a{i}" for i in range(graph.n_inputs))
    lines = [
        f"if len(args) != {graph.n_inputs}:",
        f'    raise ValueError(f"made for {graph.n_inputs} inputs, got {{len(args)}}")',
    ]
    source = "args"
    if not _is_flat(graph):
        source = "leaves"
        other = "not _same_structure(structure, _INPUTS)" if any(graph.in_spec.classes()) else "structure != _INPUTS"
        lines = [
            "leaves, structure = torch.utils._pytree.tree_flatten(args)",
            f"if {other}:",
            '    raise ValueError(f"made for inputs of the structure {_INPUTS}, got {structure}")',
        ]
    return lines + ([f"{flat}, = {source}"] if flat else [])


def _structure(graph: OpGraph) -> list[str]:
    """A constant that holds how nested inputs are put together; nothing for flat ones."""
    if _is_flat(graph):
        return []
    whole = graph.in_spec.text(["0"] * graph.n_inputs).replace("_output_class(", "_input_class(")
    return ["", f"_INPUTS = torch.utils._pytree.tree_structure({whole}[0])", ""]


def _is_flat(graph: OpGraph) -> bool:
    return not graph.in_spec.parts or all(part.kind == "leaf" for part in graph.in_spec.parts[0].parts)


def _device(graph: OpGraph, inputs: list[Node]) -> list[str]:
    """Lines that read parameters and buffers, where there are any, and say where the program computes."""
    state = [n for n in graph.nodes.values() if n.kind in ("parameter", "buffer")]
    if state:
        return ['state = vars(self)["_qimeng_state"](self)', f"device = state[{state[0].target!r}].device"]
    tensors = [f"a{n.target}" for n in inputs if n.kind == "input"]
    if tensors:
        return [f"device = {tensors[0]}.device if isinstance({tensors[0]}, torch.Tensor) else None"]
    return ["device = torch.get_default_device()"]


def _guards(graph: OpGraph, inputs: list[Node]) -> list[str]:
    """Lines that refuse what the program was not made for."""
    lines = _device(graph, inputs)
    tensors = [n for n in inputs if n.kind == "input"]
    for node in tensors:
        meta = node.metas[0]
        assert meta is not None
        name = f"a{node.target}"
        lines.append(f"_check({node.target!r}, {name}, {meta.shape}, {meta.stride}, torch.{meta.dtype}, device)")
    lines.append("_check_context(device)")
    for node in inputs:
        if node.kind == "scalar":
            lines.append(f"if not isinstance(a{node.target}, (int, float)):")
            lines.append(f'    raise ValueError(f"input {node.target}: expected a number, got {{a{node.target}!r}}")')
    for position, value in graph.scalars.items():
        lines.append(f"if not ({_equals(f'a{position}', value)}):")
        lines.append(f"    raise ValueError({f'input {position}: made for {value!r}, got '!r} + repr(a{position}))")
    return lines


def _equals(name: str, value: Any) -> str:
    """The text of a test that `name` holds `value` and nothing that merely compares equal."""
    if value is None or isinstance(value, (bool, torch.dtype)):
        return f"{name} is {literal(value)}"
    if value != value:
        return f"type({name}) is float and {name} != {name}"
    return f"type({name}) is {type(value).__name__} and {name} == {literal(value)}"


def _last_uses(graph: OpGraph, parts: Sequence[tuple[Region, Implementation]]) -> dict[int, list[Value]]:
    """Region number to the intermediate values that nothing needs after it, so that their memory is given back."""
    held = set(graph.results())
    last: dict[Value, int] = {}
    settled = settled_nodes(graph)
    made = {v for region, _ in parts for v in region.outputs}
    for k, (region, _) in enumerate(parts):
        for v in (*region.inputs, *region.outputs):
            if v in made and v not in held and v.node not in settled:
                last[v] = k
    table: dict[int, list[Value]] = {}
    for v, k in last.items():
        table.setdefault(k, []).append(v)
    return table


def _lazily_read(graph: OpGraph, parts: Sequence[tuple[Region, Implementation]]) -> list[list[Value]]:
    """For each region the values that are read from memory first there and that may be views with the sign held back.

    Kernels read from memory, and `view_as_real`, which takes no conjugated view.
    """
    lazy = {
        Value(n.name)
        for n in graph.nodes.values()
        if n.kind == "input" and graph.meta(Value(n.name)).dtype.startswith(("float", "bfloat", "complex"))
    }
    found: list[list[Value]] = []
    for region, impl in parts:
        read = [v for v in region.inputs if v in lazy]
        found.append(read if impl.generated or any(n.packet == "aten.view_as_real" for n in region.ops) else [])
        lazy -= set(found[-1])
        if not impl.generated and (read or any(n.packet in LAZY_VIEWS for n in region.ops)):
            lazy |= set(region.outputs)
    return found


__all__ = ["Meta", "emit_program"]
