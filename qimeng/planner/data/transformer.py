"""Transformers, mixers of tokens, and towers of small layers that meet: 50 to 300 operators.

Deals in heads, widths and layers. Knows nothing about how a product is computed.
"""

from __future__ import annotations

from qimeng.planner.data.draft import Draft, Tensor
from qimeng.planner.data.products import linear

BATCHES, LENGTHS, HEADS, HEAD = (8,), (512,), (8,), (64, 128)
"""Few sizes, so that networks share regions: what was found of one is known of the others."""

ACTIVATIONS = ("F.relu({x})", "F.silu({x})", "torch.tanh({x})", "torch.sigmoid({x})")


def transformer(draft: Draft) -> tuple[Tensor, ...]:
    """Family: layers of attention and two or three products, of the kinds in use; some layers are unlike the others."""
    rng = draft.rng
    batch, length = draft.size("BATCH", BATCHES), draft.size("LENGTH", LENGTHS)
    heads, head = draft.size("HEADS", HEADS), draft.size("HEAD", HEAD)
    width = f"{heads} * {head}"
    x = draft.input((batch, length, width))
    norm, rotary, causal = rng.choice(("layer", "rms")), rng.random() < 0.4, rng.random() < 0.5
    way, mlp, first = rng.choice(("library", "library", "hand")), rng.choice(_MLPS), rng.random() < 0.75
    tables = [draft.parameter((length, head)) for _ in range(2)] if rotary else []
    most = rng.randint(40, 110)
    while len(draft.lines) < most:
        if rng.random() < 0.1:
            mlp = rng.choice(_MLPS)
        for part in ("attention", "mlp"):
            y = _normed(draft, x, norm) if first else x
            if part == "attention":
                y = _attention(draft, y, (heads, head), tables, way, causal)
            else:
                y = _mlp(draft, y, mlp)
            x = draft.let(f"{x} + {y}", x.shape)
            x = x if first else _normed(draft, x, norm)
    return (_linear(draft, _normed(draft, x, norm), draft.size("CLASSES", (1000,))),)


def mixer(draft: Draft) -> tuple[Tensor, ...]:
    """Family: layers along tokens and along channels by turns (Tolstikhin et al. 2021)."""
    rng = draft.rng
    batch, length = draft.size("BATCH", (32,)), draft.size("LENGTH", (256,))
    width = draft.size("WIDTH", (256, 512))
    x = draft.input((batch, length, width))
    norm, act, most = rng.choice(("layer", "rms")), rng.choice(("gelu", "silu")), rng.randint(40, 160)
    while len(draft.lines) < most:
        y = draft.let(f"{_normed(draft, x, norm)}.transpose(1, 2)", (batch, width, length))
        y = _linear(draft, y, f"2 * {length}")
        y = _linear(draft, draft.let(f"F.{act}({y})", y.shape), length)
        x = draft.let(f"{x} + {y}.transpose(1, 2)", x.shape)
        y = _linear(draft, _normed(draft, x, norm), f"4 * {width}")
        y = _linear(draft, draft.let(f"F.{act}({y})", y.shape), width)
        x = draft.let(f"{x} + {y}", x.shape)
    mean = draft.let(f"{_normed(draft, x, norm)}.mean(1)", (batch, width))
    return (_linear(draft, mean, draft.size("CLASSES", (1000,))),)


def towers(draft: Draft) -> tuple[Tensor, ...]:
    """Family: small layers on each of several inputs, what they have in common, and layers on all of it.

    So are models that rank and recommend (Naumov et al. 2019): many small operators, which take as long to launch.
    """
    rng = draft.rng
    batch, width = draft.size("BATCH", (8192,)), draft.size("WIDTH", (64, 128))
    ends, deep = [], rng.choice((2, 3))
    for _ in range(rng.choice((4, 8))):
        x = draft.input((batch, draft.size("FEATURES", (256,))))
        for layer in range(deep):
            x = _unary(draft, _linear(draft, x, width if layer == deep - 1 else f"2 * {width}"))
            x = _normed(draft, x, "layer") if rng.random() < 0.4 else x
        ends.append(x)
    names, count = ", ".join(map(str, ends)), str(len(ends))
    all_ = draft.let(f"torch.stack(({names}), 1)", (batch, count, width))
    draft.products.append((batch, count, count, width))
    pairs = draft.let(f"torch.matmul({all_}, {all_}.transpose(1, 2))", (batch, count, count))
    flat = (batch, str(len(ends) ** 2))
    pairs = draft.let(f"{pairs}.flatten(1)", flat)
    shared = _linear(draft, pairs, width)
    for x in ends:
        shared = draft.let(f"{shared} * torch.sigmoid({x}) + {_linear(draft, _unary(draft, x), width)}", (batch, width))
    for _ in range(rng.randint(2, 6)):
        crossed = _linear(draft, shared, width)
        shared = draft.let(f"{shared} + {ends[0]} * {crossed}", (batch, width))
        shared = _normed(draft, _unary(draft, shared), "rms") if rng.random() < 0.5 else _unary(draft, shared)
    return (draft.let(f"torch.sigmoid({_linear(draft, shared, '1')})", (batch, "1")),)


def _linear(draft: Draft, x: Tensor, width: str) -> Tensor:
    """A layer with a bias."""
    return linear(draft, x, width, "layer")


def _unary(draft: Draft, x: Tensor) -> Tensor:
    """An activation."""
    return draft.let(draft.rng.choice(ACTIVATIONS).format(x=x), x.shape)


_MLPS = ("gelu", "silu gated", "squared")


def _mlp(draft: Draft, x: Tensor, way: str) -> Tensor:
    """Two products, or three of which two meet."""
    width, wide = x.shape[-1], f"{'2' if 'gated' in way else '4'} * {x.shape[-1]}"
    shape = (*x.shape[:-1], wide)
    h = _linear(draft, x, wide)
    if "gated" in way:
        h = draft.let(f"F.{way.split()[0]}({h}) * {_linear(draft, x, wide)}", shape)
    elif way == "squared":
        h = draft.let(f"torch.square(F.relu({h}))", shape)
    else:
        h = draft.let(f"F.gelu({h})", shape)
    return _linear(draft, h, width)


def _attention(draft: Draft, x: Tensor, sizes: tuple[str, str], tables: list[Tensor], way: str, causal: bool) -> Tensor:
    """Self-attention of [batch, length, width], by PyTorch's function or written out."""
    (heads, head), (batch, length, width) = sizes, x.shape
    shape = (batch, heads, length, head)
    q, k, v = (
        draft.let(f"{_linear(draft, x, width)}.view({batch}, {length}, {heads}, {head}).transpose(1, 2)", shape)
        for _ in range(3)
    )
    if tables:
        cosine, sine = tables
        q, k = (
            draft.let(
                f"{t} * {cosine} + torch.cat((-{t}[..., {head} // 2 :], {t}[..., : {head} // 2]), -1) * {sine}", shape
            )
            for t in (q, k)
        )
    draft.products += [(batch, heads, length, length, head)] * 2
    if way == "library":
        y = draft.let(f"F.scaled_dot_product_attention({q}, {k}, {v}, is_causal={causal})", shape)
    else:
        scores = (batch, heads, length, length)
        s = draft.let(f"torch.matmul({q}, {k}.transpose(2, 3)) * {head} ** -0.5", scores)
        y = draft.let(f"torch.matmul(torch.softmax({s}, dim=-1), {v})", shape)
    return _linear(draft, draft.let(f"{y}.transpose(1, 2).reshape({batch}, {length}, {width})", x.shape), width)


def _normed(draft: Draft, x: Tensor, way: str) -> Tensor:
    """`x` normalized along its last axis."""
    width = x.shape[-1]
    if way == "rms":
        scale = draft.let(f"torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-6)", (*x.shape[:-1], "1"))
        return draft.let(f"{x} * {scale} * {draft.parameter((width,))}", x.shape)
    return draft.let(f"{draft.module(f'nn.LayerNorm({width})', (width,), (width,))}({x})", x.shape)


__all__ = ["mixer", "towers", "transformer"]
