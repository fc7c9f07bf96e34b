"""Matrix products with prologues and epilogues, gated products, products in a row, and small programs of several parts.

Deals in operands, depths and what surrounds a product. Knows nothing about how a product is computed.
"""

from __future__ import annotations

from qimeng.planner.data.draft import Draft, Shape, Tensor
from qimeng.planner.data.pointwise import binary, chain, number, some, unary
from qimeng.planner.data.rows import normalized, reduced, softmaxed

DEPTHS = (64, 96, 128, 200, 256, 384, 512, 768, 1000, 1024, 2048, 3072, 4096, 8192)
WIDE = (2048, 3072, 4096, 5120, 6144, 8192, 11008, 14336, 16384)
SIZES = (64, 96, 128, 250, 256, 384, 512, 768, 1000, 1024, 1536, 2048, 4096)


def linear(draft: Draft, x: Tensor, width: str, way: str = "") -> Tensor:
    """`x` times a matrix of parameters, with a bias where `way` is ``"layer"``; one of the ways is drawn by default."""
    depth = x.shape[-1]
    shape = (*x.shape[:-1], width)
    draft.products.append((*x.shape, width))
    way = way or draft.rng.choice(("layer", "layer", "plain", "matrix"))
    if way == "matrix":
        matrix = draft.parameter((depth, width), f"torch.randn({{shape}}) / ({depth}) ** 0.5")
        return draft.let(f"torch.matmul({x}, {matrix})", shape)
    bias = way == "layer"
    layer = draft.module(
        f"nn.Linear({depth}, {width}{'' if bias else ', bias=False'})",
        (width, depth),
        *([(width,)] if bias else []),
    )
    return draft.let(f"{layer}({x})", shape)


def product(draft: Draft) -> tuple[Tensor, ...]:
    """Family: one product (of a matrix and weights, of two matrices, transposed, batched) between two chains."""
    rng = draft.rng
    way = rng.choice(("weights", "weights", "weights", "matrices", "left", "right", "batched"))
    depth, width = draft.size("DEPTH", DEPTHS), draft.size("WIDTH", SIZES)
    if way == "batched":
        batch, height = draft.size("BATCH"), draft.size("HEIGHT", SIZES)
        x, y = draft.input((batch, height, depth)), draft.input((batch, depth, width))
        out: Shape = (batch, height, width)
    else:
        rows = draft.size("ROWS")
        out = (rows, width)
        x = draft.input((depth, rows) if way == "left" else (rows, depth))
        if way == "weights":
            before = normalized(draft, x) if rng.random() < 0.25 else some(draft, x, 2)
            return (_epilogue(draft, linear(draft, before, width)),)
        y = draft.input((width, depth) if way == "right" else (depth, width))
    a, b = some(draft, x, 1), some(draft, y, 1)
    draft.products.append((*out, depth))
    scale = rng.choice(("", f" * ({depth}) ** -0.5"))
    text = f"torch.matmul({a}{'.t()' if way == 'left' else ''}, {b}{'.t()' if way == 'right' else ''}){scale}"
    return (_epilogue(draft, draft.let(text, out)),)


def wide(draft: Draft) -> tuple[Tensor, ...]:
    """Family: a large matrix of weights, as in the layers of large models, between two chains."""
    x = draft.input((draft.size("ROWS"), draft.size("DEPTH", WIDE)))
    return (_epilogue(draft, linear(draft, some(draft, x, 1), draft.size("WIDTH", WIDE))),)


def _epilogue(draft: Draft, x: Tensor) -> Tensor:
    """What follows a product: a chain, a reduction of its rows, a normalization or a distribution."""
    way = draft.rng.choice(("chain", "chain", "chain", "reduce", "norm", "softmax"))
    x = chain(draft, x, draft.rng.randint(1, 4))
    if way == "reduce":
        return unary(draft, reduced(draft, x, -1, keep=False))
    if way == "norm":
        return some(draft, normalized(draft, x))
    if way == "softmax":
        return some(draft, softmaxed(draft, x), 1)
    return x


def gated(draft: Draft) -> tuple[Tensor, ...]:
    """Family: two products of one operand that meet: gated units, halves of one product, low-rank additions."""
    rng = draft.rng
    x = draft.input((draft.size("ROWS"), draft.size("DEPTH", DEPTHS)))
    width = draft.size("WIDTH", SIZES)
    operand = normalized(draft, x) if rng.random() < 0.3 else x
    way = rng.choice(("two", "two", "halves", "low rank"))
    if way == "halves":
        both = linear(draft, operand, f"2 * {width}")
        shape = (*x.shape[:-1], width)
        gate = draft.let(f"{both}[..., :{width}]", shape)
        value = draft.let(f"{both}[..., {width}:]", shape)
        return (some(draft, binary(draft, unary(draft, gate), value), 2),)
    main = linear(draft, operand, width)
    if way == "low rank":
        rank = draft.size("RANK", (8, 16, 32, 64))
        added = linear(draft, linear(draft, operand, rank), width)
        return (some(draft, draft.let(f"{main} + {number(draft)} * {added}", main.shape)),)
    return (some(draft, binary(draft, unary(draft, main), linear(draft, operand, width)), 2),)


def attention(draft: Draft) -> tuple[Tensor, ...]:
    """Family: two products of activations with a distribution or an activation between them."""
    rng = draft.rng
    batch = draft.size("BATCH")
    queries, keys = draft.size("QUERIES", (16, 64, 100, 128, 256, 512)), draft.size("KEYS", (16, 64, 77, 128, 256, 512))
    depth = draft.size("DEPTH", (16, 32, 64, 80, 128))
    q, k, v = (draft.input((batch, n, depth)) for n in (queries, keys, keys))
    shape = (batch, queries, keys)
    draft.products += [(*shape, depth)] * 2
    scores = draft.let(f"torch.matmul({q}, {k}.transpose(1, 2)) * ({depth}) ** -0.5", shape)
    weights = some(draft, scores, 1)
    weights = softmaxed(draft, weights) if rng.random() < 0.6 else unary(draft, weights)
    return (some(draft, draft.let(f"torch.matmul({weights}, {v})", (batch, queries, depth)), 2),)


def block(draft: Draft) -> tuple[Tensor, ...]:
    """Family: three to five parts in a row: normalizations, products, chains, distributions, residuals."""
    rng = draft.rng
    x = draft.input((draft.size("ROWS"), draft.size("WIDTH", SIZES)))
    y, products = x, 0
    for _ in range(rng.randint(3, 5)):
        way = rng.choice(("norm", "product", "chain", "softmax", "residual", "spread"))
        if way == "product" and products < 2:
            products += 1
            y = linear(draft, y, draft.size("WIDTH", SIZES) if rng.random() < 0.5 else x.shape[-1])
        elif way == "norm":
            y = normalized(draft, y)
        elif way == "softmax":
            y = softmaxed(draft, y)
        elif way == "spread":
            y = binary(draft, y, reduced(draft, y, -1, keep=True))
        elif way == "residual" and y.shape == x.shape and y != x:
            y = draft.let(f"{y} + {x}", x.shape)
        else:
            y = chain(draft, y, rng.randint(1, 3))
    if rng.random() < 0.25:
        return (reduced(draft, unary(draft, y), -1, keep=False),)
    return (y,)


__all__ = ["attention", "block", "gated", "linear", "product", "wide"]
