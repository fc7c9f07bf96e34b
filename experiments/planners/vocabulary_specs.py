"""Specs whose best kernels come from the vocabulary packages: weights with zeros or in fewer bits, graphs, experts.

Deals in readable PyTorch files drawn from a number. Those to train on and those held out share no size, share of
zeros, pattern or kind of graph. Knows nothing about planners.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from qimeng.planner.data.generate import Drawn
from qimeng.spec import KernelSpec

HEAD = """import torch
import torch.nn as nn
import torch.nn.functional as F

"""

TAIL = """

def get_init_inputs():
    return []
"""


@dataclass(frozen=True)
class Half:
    """What specs of one half are drawn from.

    Attributes:
        name: of the half.
        widths: of layers.
        rows: of activations.
        percents: shares of a weight that are kept.
        patterns: where a weight's large elements lie (`PATTERNS`).
        graphs: kinds of graph (`GRAPHS`).
        nodes: of a graph.
        degrees: edges for each node.
        features: of a node, or of a row of a table.
        bags: bags of an embedding.
        experts: of a layer of experts.
        tokens: rows of such a layer.
        dtypes: of floating tensors.
        counts: specs of each family, a round after another.
    """

    name: str
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    percents: tuple[float, ...]
    patterns: tuple[str, ...]
    graphs: tuple[str, ...]
    nodes: tuple[int, ...]
    degrees: tuple[int, ...]
    features: tuple[int, ...]
    bags: tuple[int, ...]
    experts: tuple[int, ...]
    tokens: tuple[int, ...]
    dtypes: tuple[str, ...]
    counts: Mapping[str, int]


TRAINING = Half(
    "training",
    widths=(1024, 1536, 2048, 3072, 4096),
    rows=(1, 8, 64, 512, 2048),
    percents=(1, 4, 8, 16, 30, 50),
    patterns=("anywhere", "banded"),
    graphs=("even", "banded"),
    nodes=(5_000, 20_000, 50_000),
    degrees=(4, 16),
    features=(32, 128),
    bags=(1024, 8192),
    experts=(8, 32),
    tokens=(16, 256),
    dtypes=("bfloat16", "bfloat16", "float16"),
    counts={"sparse": 10, "stored": 10, "graph": 7, "bag": 4, "experts": 5},
)
HELD_OUT = Half(
    "heldout",
    widths=(1280, 1792, 2560, 3584),
    rows=(2, 16, 128, 1024),
    percents=(2, 6, 12, 25, 40),
    patterns=("rmat", "powerlaw", "blocks"),
    graphs=("rmat", "powerlaw"),
    nodes=(8_000, 30_000),
    degrees=(8, 24),
    features=(64, 96),
    bags=(3000, 12_000),
    experts=(12, 24),
    tokens=(48, 640),
    dtypes=("bfloat16", "float16", "bfloat16"),
    counts={"sparse": 6, "stored": 6, "graph": 4, "bag": 2, "experts": 2},
)
SMALL = Half(
    "small",
    widths=(64, 96),
    rows=(2, 16),
    percents=(10, 40),
    patterns=("rmat", "banded"),
    graphs=("rmat", "even"),
    nodes=(64,),
    degrees=(4,),
    features=(32,),
    bags=(16,),
    experts=(4,),
    tokens=(8,),
    dtypes=("bfloat16",),
    counts={"sparse": 1, "stored": 1, "graph": 1, "bag": 1, "experts": 1},
)
"""To try what uses the others, on a CPU."""

PATTERNS: Mapping[str, str] = {
    "anywhere": "torch.ones(outputs, depth)",
    "banded": "torch.exp(-32.0 * (torch.arange(outputs)[:, None] / outputs - torch.arange(depth) / depth).abs())",
    "powerlaw": "((1.0 + torch.arange(outputs)) ** -0.5)[:, None].expand(outputs, depth)",
    "blocks": "(torch.arange(outputs)[:, None] * 8 // outputs == torch.arange(depth) * 8 // depth) + 0.01",
    "rmat": "quarters(outputs, depth)",
}
"""Factor on the elements of a weight, as it is written in a spec; those of largest magnitude are kept."""

QUARTERS = """
def quarters(outputs, depth):
    rows, columns, found = torch.arange(outputs)[:, None], torch.arange(depth), torch.ones(outputs, depth)
    for bit in range(6):
        corner = 2 * (rows * 2 ** (bit + 1) // outputs % 2) + columns * 2 ** (bit + 1) // depth % 2
        found = found * torch.tensor([0.57, 0.19, 0.19, 0.05])[corner] ** 0.5
    return found

"""
"""The recursive quarters of an R-MAT matrix (Chakrabarti, Zhan and Faloutsos, 2004)."""

GRAPHS: Mapping[str, str] = {
    "even": "torch.randint(0, NODES, (2, EDGES))",
    "banded": "torch.stack([(torch.arange(EDGES) + torch.randint(0, 64, (EDGES,))) % NODES,"
    " torch.arange(EDGES) % NODES])",
    "powerlaw": "torch.stack([torch.randint(0, NODES, (EDGES,)), (NODES * torch.rand(EDGES) ** 3).long()])",
    "rmat": "sum(2 ** bit * torch.stack([torch.rand(EDGES) < 0.24, torch.rand(EDGES) < 0.24]).long()"
    " for bit in range(NODES.bit_length())) % NODES",
}
"""Edges, sources above targets, as they are written in a spec; `rmat` draws the two ends' quarters apart."""

ACTIVATIONS = ("F.relu({})", "F.gelu({})", "F.silu({})", "torch.tanh({})", "torch.sigmoid({})")

Body = tuple[str, str]
"""Text of a file between `HEAD` and `TAIL`, and what it declares of its weights."""


def sparse(rng: random.Random, half: Half) -> Body:
    """Layers with zeros in their weights."""
    form, pattern = rng.choice(("bsr:32", "bsr:64", "bsr:128", "csr", "csr")), rng.choice(half.patterns)
    percent = rng.choice([p for p in half.percents if form != "csr" or p < 20])
    scale = [
        "        with torch.no_grad():",
        "            for layer in self.children():",
        "                outputs, depth = layer.weight.shape",
        f"                layer.weight.mul_({PATTERNS[pattern]})",
    ]
    text = _layers(rng, half, scale)
    return (QUARTERS if pattern == "rmat" else "") + text, f"{form}:{percent:g}"


def stored(rng: random.Random, half: Half) -> Body:
    """Layers with weights in fewer bits."""
    return _layers(rng, half, []), rng.choice(("int8", "int4", "int4:64", "fp8"))


def graph(rng: random.Random, half: Half) -> Body:
    """One or two layers of a graph network."""
    nodes, features = rng.choice(half.nodes), rng.choice(half.features)
    edges, act = nodes * rng.choice(half.degrees), rng.choice(ACTIVATIONS)
    sizes = f"NODES = {nodes}\nEDGES = {edges}\nWIDTH = {features}\n"
    reduce, count = rng.choice(("sum", "sum", "mean", "amax")), rng.choice((1, 2))
    message = rng.choice(("h[source] * weights[:, None]", f"{act.format('h[source]')} * weights[:, None]"))
    lines = ["source, target = self.edges", "h = x"]
    for number in range(count):
        lines += [f"h = self.layer{number}(h)", f"messages = {message}"]
        if reduce == "sum":
            lines.append("h = torch.zeros_like(h).index_add(0, target, messages)")
        else:
            lines.append("spread = target[:, None].expand_as(messages)")
            lines.append(f"h = torch.zeros_like(h).scatter_reduce(0, spread, messages, {reduce!r}, include_self=False)")
        lines.append(f"h = {act.format('h')}")
    init = [f"self.layer{number} = nn.Linear(WIDTH, WIDTH)" for number in range(count)]
    init += ["torch.manual_seed(0)", f'self.register_buffer("edges", {GRAPHS[rng.choice(half.graphs)]})']
    made = "torch.randn(NODES, WIDTH), torch.rand(EDGES)"
    return sizes + _model(init, "x, weights", lines, "h", made), ""


def bag(rng: random.Random, half: Half) -> Body:
    """Bags of embeddings, or rows reduced by segments of known lengths, and a layer on them."""
    count, features = rng.choice(half.bags), rng.choice(half.features)
    each, act = rng.choice((4, 16)), rng.choice(ACTIVATIONS)
    sizes = f"BAGS = {count}\nEACH = {each}\nWIDTH = {features}\n"
    if rng.random() < 0.5:
        mode = rng.choice(("sum", "mean", "max"))
        init = [f'self.table = nn.EmbeddingBag(50_000, WIDTH, mode="{mode}")', "self.layer = nn.Linear(WIDTH, WIDTH)"]
        lines = [f"h = {act.format('self.layer(self.table(numbers, offsets))')}"]
        made = "torch.randint(0, 50_000, (BAGS * EACH,)), torch.arange(BAGS) * EACH"
        return sizes + _model(init, "numbers, offsets", lines, "h", made), ""
    reduce = rng.choice(("sum", "mean", "max"))
    gated = rng.choice(("x * torch.sigmoid(gate)", f"{act.format('x + gate')}"))
    lines = [f"h = torch.segment_reduce({gated}, {reduce!r}, lengths=lengths, axis=0)", "h = self.layer(h)"]
    made = ", ".join(["torch.randn(BAGS * EACH, WIDTH)"] * 2) + ", torch.full((BAGS,), EACH)"
    return sizes + _model(["self.layer = nn.Linear(WIDTH, WIDTH)"], "x, gate, lengths", lines, "h", made), ""


def experts(rng: random.Random, half: Half) -> Body:
    """A layer of experts: all of them computed, or the chosen ones gathered."""
    count, tokens, act = rng.choice(half.experts), rng.choice(half.tokens), rng.choice(ACTIVATIONS[:3])
    form = rng.choice(("all", "all", "chosen")) if tokens > 64 else rng.choice(("all", "chosen"))
    tokens = min(tokens, 64) if form == "chosen" else tokens  # one matrix is copied for each row
    width = 512 if half.widths[0] >= 512 else half.widths[0]
    sizes = f"EXPERTS = {count}\nROWS = {tokens}\nWIDTH = {width}\nINNER = {2 * width}\n"
    init = [
        "self.router = nn.Linear(WIDTH, EXPERTS, bias=False)",
        "self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / WIDTH**0.5)",
        "self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / INNER**0.5)",
    ]
    lines = [
        "weights, chosen = torch.topk(torch.softmax(self.router(x), -1), 2)",
        "weights = weights / weights.sum(-1, keepdim=True)",
    ]
    if form == "all":
        lines += [
            "shares = x.new_zeros(ROWS, EXPERTS).scatter(1, chosen, weights)",
            f"h = {act.format('torch.matmul(x, self.up.transpose(1, 2))')}",
            "y = (torch.matmul(h, self.down.transpose(1, 2)) * shares.t().unsqueeze(-1)).sum(0)",
        ]
    else:
        einsum = 'torch.einsum("td,tkhd->tkh", x, self.up[chosen])'
        lines += [
            f"h = {act.format(einsum)}",
            'y = (torch.einsum("tkh,tkdh->tkd", h, self.down[chosen]) * weights.unsqueeze(-1)).sum(1)',
        ]
    return sizes + _model(init, "x", lines, "y", "torch.randn(ROWS, WIDTH)"), ""


FAMILIES: Mapping[str, Callable[[random.Random, Half], Body]] = {
    "sparse": sparse,
    "stored": stored,
    "graph": graph,
    "bag": bag,
    "experts": experts,
}


def drawn(half: Half) -> tuple[Drawn, ...]:
    """The specs of `half`, families in turns, each text once; always the same ones."""
    return tuple(_drawn(half))


def _drawn(half: Half) -> Iterator[Drawn]:
    seen, index = set[str](), 0
    waiting = dict(half.counts)
    while waiting:
        for family in tuple(waiting):
            while True:
                rng = random.Random(f"{half.name}/{family}/{index}")
                text, weights = FAMILIES[family](rng, half)
                dtype = "float32" if family in ("graph", "bag") else rng.choice(half.dtypes)
                name = f"{half.name}-{index}-{family}"
                spec = KernelSpec.from_source(HEAD + text + TAIL, name, dtype=dtype, weights=weights)
                index += 1
                if spec.digest not in seen:
                    break
            seen.add(spec.digest)
            yield Drawn(spec, family, 0, index - 1)
            waiting[family] -= 1
            if not waiting[family]:
                del waiting[family]


def _layers(rng: random.Random, half: Half, after: list[str]) -> str:
    """One linear layer, two around an activation with what went in added, a gated pair, or a stack of three."""
    width, inner, third = (rng.choice(half.widths) for _ in range(3))
    act, other = rng.choice(ACTIVATIONS), rng.choice(ACTIVATIONS)
    sizes = {"ROWS": rng.choice(half.rows), "WIDTH": width, "INNER": inner, "THIRD": third}
    shape = rng.choice(("layer", "residual", "gated", "stack"))
    if shape == "layer":
        layers, lines = ["WIDTH, INNER"], [f"y = {act.format('self.layer0(x)')}"]
    elif shape == "residual":
        layers = ["WIDTH, INNER", "INNER, WIDTH"]
        lines = [f"h = {act.format('self.layer0(F.rms_norm(x, (WIDTH,)))')}", "y = x + self.layer1(h)"]
    elif shape == "gated":
        layers = ["WIDTH, INNER", "WIDTH, INNER", "INNER, WIDTH"]
        lines = [f"h = {act.format('self.layer0(x)')} * self.layer1(x)", "y = self.layer2(h)"]
    else:
        layers = ["WIDTH, INNER", "INNER, THIRD", "THIRD, WIDTH"]
        lines = [f"h = {act.format('self.layer0(x)')}", f"h = {other.format('self.layer1(h)')}", "y = self.layer2(h)"]
    used = "".join(f"{n} = {v}\n" for n, v in sizes.items() if n == "ROWS" or any(n in layer for layer in layers))
    init = [f"self.layer{i} = nn.Linear({layer})" for i, layer in enumerate(layers)]
    return used + _model(init, "x", lines, "y", "torch.randn(ROWS, WIDTH)", after)


def _model(init: list[str], inputs: str, lines: list[str], result: str, made: str, after: list[str] = []) -> str:  # noqa: B006
    body = [
        "",
        "",
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in init),
        *after,
        "",
        f"    def forward(self, {inputs}):",
        *(f"        {line}" for line in lines),
        f"        return {result}",
        "",
        "",
        "def get_inputs():",
        f"    return [{made}]",
    ]
    return "\n".join(body) + "\n"


__all__ = ["FAMILIES", "HELD_OUT", "SMALL", "TRAINING", "Half", "drawn"]
