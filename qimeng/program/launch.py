"""Programs that record their kernels as a CUDA graph and replay it: one launch for all of them.

Deals in the text of such a program and in which programs may be recorded. Inputs are copied to memory of the program's
own before a replay, results are copied from there, so that callers may keep them. Source: NVIDIA, CUDA C++ Programming
Guide, section CUDA Graphs; PyTorch's notes on CUDA graphs. Knows nothing about what the kernels compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from qimeng.graph.loops.loop import is_loop
from qimeng.graph.memory import memory_of
from qimeng.graph.opgraph import Node, OpGraph, Value, values_in
from qimeng.graph.ops import category

CUDA_GRAPH, STREAMS = "cuda-graph", "streams"
"""One launch for all kernels, in a row or with independent ones side by side (`qimeng.program.lanes`)."""

WAITS = frozenset(
    f"aten.{name}"
    for name in "nonzero masked_select _local_scalar_dense item unique unique2 _unique2 unique_consecutive "
    "repeat_interleave bincount".split()
)
"""Operators that may wait for the GPU to know a size."""

INDEXED = ("aten.index", "aten.index_put")
"""Operators that do so where an index is a mask."""

RUNTIME = '''
def _record(function):
    """Record the kernels of `function` as a CUDA graph; what replays it, and what `function` returned."""
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(2):  # what is compiled or chosen at first calls must be done before
            function()
    here.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = function()
    return graph.replay, found


def _may_record(device):
    """Whether calls are to be recorded: on a GPU, and where nobody else is recording them."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _like(tensor):
    """Memory of its own for a tensor of the same shape and strides; usable inside and outside of inference mode."""
    with torch.inference_mode(False):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _copied(source, target):
    """`target` with the values of `source`; what an expanded dimension repeats is copied once."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in source.stride())
    target[once].copy_(source[once])
    return target


class _Launch:
    """Replays a recording of the program.

    It is recorded at the first call, and again when a parameter or buffer is changed or replaced. Buffers that each
    call updates are read and written where they are; what the calls before a recording did to them is undone. Threads
    take turns: they share its memory.
    """

    def __init__(self):
        import threading

        self.turn = threading.Lock()
        self.stamp, self.replay, self.stream, self.on = None, None, None, True
        self.inputs, self.outputs, self.made_from = (), (), ()

    def __reduce__(self):
        return _Launch, ()

    def __call__(self, run, device, state, updated, prepared, inputs):
        if not (self.on and _may_record(device)):
            return run(*inputs)
        with self.turn, torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            if self.stream is not None and stream != self.stream:  # the memory is shared with calls on that one
                stream.wait_stream(self.stream)
            self.stream = stream
            own = {id(t) for t in updated}
            stamp = [(t.data_ptr(), None if id(t) in own else t._version) for t in state]
            if stamp != self.stamp or any(p.stamp is None for p in prepared):
                self.stamp = self.replay = self.outputs = None  # memory of the last recording is given back first
                self.inputs = [_copied(x, _like(x)) for x in inputs]
                before = [_copied(t, _like(t)) for t in updated]
                try:
                    self.replay, self.outputs = _record(lambda: run(*self.inputs))
                finally:
                    for t, was in zip(updated, before):
                        t.copy_(was)
                # what the recording reads by its address stays where it is
                self.stamp, self.made_from = stamp, [*(t.detach() for t in state), *(p.buffers for p in prepared)]
            for x, mine in zip(inputs, self.inputs):
                _copied(x, mine)
            self.replay()
            return [_copied(y, torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device))
                    for y in self.outputs]

'''


def obstacle(graph: OpGraph) -> str:
    """Why a program for `graph` cannot be recorded; empty where it can."""
    if "obstacle" not in graph.memo:
        graph.memo["obstacle"] = _obstacle(graph)
    return str(graph.memo["obstacle"])


def _obstacle(graph: OpGraph) -> str:
    if any(n.kind == "scalar" for n in graph.nodes.values()):
        return "a Python number among the inputs would be recorded with the value of the first call"
    for node in graph.ops():
        if category(node) == "random":
            return f"{node.packet.removeprefix('aten.')} draws random numbers, which a replay would repeat"
        if node.packet in WAITS or _has_mask(graph, node) or (node.literal is not None and not is_loop(node)):
            return f"{node.packet.removeprefix('aten.')} may wait for the GPU in the middle of a call"
    roots = [memory_of(graph.nodes, v) for v in graph.outputs if isinstance(v, Value)]
    held = [r for r in roots if graph.nodes[r.node].kind != "op"]
    if held:
        return f"a result is the memory of {held[0].node} itself, and a replay returns copies"
    if len(set(roots)) < len(roots):
        return "two results are views of the same memory, and a replay returns copies"
    if not any(n.kind == "input" for n in graph.nodes.values()):
        return "there is no input"
    return ""


def _has_mask(graph: OpGraph, node: Node) -> bool:
    """Whether an index of `node` is a mask, so that its values say how many elements are read or written."""
    return node.packet in INDEXED and any(graph.meta(v).dtype == "bool" for v in values_in(node.args[1]))


def copied_bytes(graph: OpGraph) -> int:
    """Bytes that a replay moves beyond the program's own: inputs and results, each read and written once."""
    inputs = [Value(n.name) for n in graph.nodes.values() if n.kind == "input"]
    results = [v for v in graph.outputs if isinstance(v, Value)]
    return 2 * sum(graph.meta(v).bytes for v in (*inputs, *results))


def launch_call(state: bool, updated: Sequence[str], inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """The lines of `forward` that launch the program.

    Args:
        state: whether there are parameters or buffers.
        updated: keys of the buffers that a call updates.
        inputs: names of the input tensors.
        outputs: names for the results.
    """
    held = "state.values()" if state else "()"
    own = f"({''.join(f'state[{key!r}], ' for key in updated)})"
    return [
        f"given = ({''.join(f'{i}, ' for i in inputs)})",
        'launch, prepared = vars(self)["_qimeng_launch"], vars(self)["_qimeng_prepared"]',
        f"{''.join(f'{o}, ' for o in outputs)}= launch(self._qimeng_run, device, {held}, {own}, prepared, given)",
    ]


__all__ = ["CUDA_GRAPH", "RUNTIME", "STREAMS", "copied_bytes", "launch_call", "obstacle"]
