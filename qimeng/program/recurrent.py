"""Weights of recurrent layers in one piece of memory, as cuDNN reads them; others it copies at every call.

Deals in source text: what a file with such layers on PyTorch does as `torch.nn.LSTM` does. Knows nothing about their
computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qimeng.graph.opgraph import OpGraph, Value

_GATES = {"aten.rnn_relu.input": 1, "aten.rnn_tanh.input": 1, "aten.lstm.input": 4, "aten.gru.input": 3}
"""Matrices of a layer that lie above one another, in the order of cuDNN's numbers of these kinds."""

_MODULE = '''
class _Recurrent(torch.nn.Module):
    """Keeps the weights of each recurrent layer in one piece of memory; cuDNN copies others at every call."""

    def _apply(self, *args, **kwargs):
        super()._apply(*args, **kwargs)
        self._qimeng_flatten()
        return self

    def _qimeng_flatten(self):
        held = dict(self.named_parameters(remove_duplicate=False))
        for keys, *facts in _LAYERS:
            weights = [held[key] for key in keys if key in held]
            if len(weights) < len(keys) or not all(torch.backends.cudnn.is_acceptable(w) for w in weights):
                continue
            apart = len({w.data_ptr() for w in weights}) == len(keys)
            if apart and len({w.dtype for w in weights}) == 1 and torch._use_cudnn_rnn_flatten_weight():
                with torch.no_grad(), torch.cuda.device_of(weights[0]):
                    torch._cudnn_rnn_flatten_weight(weights, *facts)

'''


def recurrent_section(graph: OpGraph) -> str:
    """The class `_Recurrent` of a file, which its `Model` derives from; empty where `graph` has no recurrent layer."""
    layers = dict.fromkeys(_layers(graph))
    lines = [f"    ({keys!r}, {', '.join(map(repr, facts))})," for keys, *facts in layers]
    return "\n".join(["", "_LAYERS = [", *lines, "]", "", _MODULE]) if layers else ""


def _layers(graph: OpGraph) -> Iterator[tuple[Any, ...]]:
    """For each layer the names of its parameters, and the other arguments of `torch._cudnn_rnn_flatten_weight`."""
    for node in graph.ops():
        if node.target not in _GATES or not all(isinstance(v, Value) for v in node.args[2]):
            continue
        weights = [graph.nodes[v.node] for v in node.args[2]]
        if any(w.kind != "parameter" for w in weights):  # computed anew in every call
            continue
        count, both, batch_first = node.args[4], node.args[7], node.args[8]
        (rows, inputs), (_, state) = (graph.meta(v).shape for v in node.args[2][:2])
        hidden = rows // _GATES[node.target]
        projected = 0 if state == hidden else state
        each = len(weights) // (count * (2 if both else 1))
        kind = list(_GATES).index(node.target)
        yield tuple(w.target for w in weights), each, inputs, kind, hidden, projected, count, batch_first, both


__all__ = ["recurrent_section"]
