"""Categories of ATen operators.

Deals in names of operators only. A category says what kind of loop nest computes the operator alone; legality,
estimates and the observation read it. What covers a whole region is a family of kernels (`qimeng.family`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from qimeng.graph.opgraph import Node, OpGraph

VIEWS = frozenset(
    "aten.view aten._unsafe_view aten.reshape aten.permute aten.transpose aten.t aten.unsqueeze aten.squeeze "
    "aten.expand aten.alias aten.detach aten.select aten.slice aten.diagonal aten.unfold aten.as_strided "
    "aten.view_as_real".split()
)
"""Operators that only change how memory is read; free on PyTorch."""

RESHAPES = frozenset(
    "aten.view aten._unsafe_view aten.reshape aten.permute aten.transpose aten.t aten.unsqueeze aten.squeeze "
    "aten.expand aten.alias aten.detach".split()
)
"""Views that keep every element, so that a kernel can follow them in the middle of a region."""

GEMMS = frozenset(
    "aten.mm aten.bmm aten.addmm aten.baddbmm aten.linear aten.matmul aten.mv aten.dot aten.addmv".split()
)
"""Operators that are matrix products."""

REDUCTIONS = frozenset(
    "aten.sum aten.mean aten.amax aten.amin aten.max aten.min aten.prod aten.var aten.var_mean aten.std aten.argmax "
    "aten.argmin aten.any aten.all aten.logsumexp aten.linalg_vector_norm aten.norm aten._softmax aten._log_softmax "
    "aten.native_layer_norm aten.native_group_norm aten._native_batch_norm_legit "
    "aten._native_batch_norm_legit_functional aten._native_batch_norm_legit_no_training aten.native_batch_norm "
    "aten._fused_rms_norm aten.rms_norm".split()
)

SCANS = frozenset("aten.cumsum aten.cumprod aten.cummax aten.cummin aten.logcumsumexp".split())
"""Operators that keep every partial result along a dimension."""

POINTWISE = frozenset(
    ("aten." + name)
    for name in (
        "add sub rsub mul div pow neg copysign abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal "
        "sin cos tan tanh sinh cosh asin acos atan atan2 asinh acosh atanh sigmoid relu relu6 leaky_relu elu selu celu "
        "gelu silu mish hardsigmoid hardswish hardtanh softplus softsign log_sigmoid_forward threshold "
        "clamp clamp_min clamp_max maximum "
        "minimum fmod remainder where eq ne lt le gt ge "
        "logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor "
        "bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ sign floor ceil "
        "round trunc erf erfc isnan isinf square clone _to_copy copy scalar_tensor full full_like zeros_like ones_like "
        "lift_fresh_copy tril triu arange fill masked_fill addcmul addcdiv lerp hypot frac sgn signbit "
        "native_dropout prelu _prelu_kernel glu"
    ).split()
)
"""Operators that compute each element of the result from the same elements of the operands."""

EXACT = VIEWS | frozenset(
    ("aten." + name)
    for name in (
        "neg copysign abs relu threshold clamp clamp_min clamp_max hardtanh relu6 maximum minimum where eq ne lt le gt "
        "ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor sign sgn "
        "signbit floor ceil round trunc isnan isinf clone _to_copy copy scalar_tensor full full_like zeros_like "
        "ones_like lift_fresh_copy tril triu arange fill masked_fill amax amin max min argmax argmin any all "
        "cummax cummin gather index_select index embedding sort argsort topk kthvalue cat stack flip roll repeat "
        "constant_pad_nd"
    ).split()
)
"""Operators that return some of their operands' values, or exact facts about them, so every right program agrees."""

JUMPS = frozenset(
    ("aten." + name)
    for name in (
        "sign sgn floor ceil round trunc frac fmod remainder floor_divide threshold hardshrink heaviside median mode"
    ).split()
)
"""Operators whose floating-point result may jump for a tiny change of an operand; integer results always may."""

INDEXING = frozenset("aten.gather aten.index_select aten.embedding".split())

RANDOM = frozenset(
    "aten.rand aten.randn aten.rand_like aten.randn_like aten.native_dropout aten.dropout aten.bernoulli aten.randint "
    "aten.multinomial aten.normal aten.uniform aten.randperm aten.rrelu_with_noise".split()
)
"""Operators whose result changes from call to call; they stay on PyTorch."""

ATTENTIONS = frozenset(
    "aten.scaled_dot_product_attention aten._scaled_dot_product_flash_attention "
    "aten._scaled_dot_product_efficient_attention aten._scaled_dot_product_cudnn_attention "
    "aten._scaled_dot_product_flash_attention_for_cpu".split()
)

LAYERS = frozenset("aten.lstm aten.gru aten.rnn_tanh aten.rnn_relu".split())
"""Recurrent layers: a step of a sequence needs the one before."""

CONVOLUTIONS = frozenset("aten.convolution aten.conv1d aten.conv2d aten.conv3d".split())
"""Operators that are convolutions."""


def category(node: Node) -> str:
    """The kind of loop nest that computes `node` alone.

    One of ``view``, ``pointwise``, ``reduction``, ``scan``, ``gemm``, ``attention``, ``indexing``, ``random``,
    ``convolution`` and ``other``.
    """
    packet = node.packet
    if packet in RANDOM:
        return "random"
    if packet in VIEWS:
        return "view"
    if packet in GEMMS:
        return "gemm"
    if packet in ("aten.max", "aten.min") and node.target.endswith(".other"):
        return "pointwise"
    if packet in REDUCTIONS:
        return "reduction"
    if packet in SCANS:
        return "scan"
    if packet in POINTWISE:
        return "pointwise"
    if packet in INDEXING:
        return "indexing"
    if packet in ATTENTIONS:
        return "attention"
    if packet in CONVOLUTIONS:
        return "convolution"
    return "other"


LAYER_LOOP = "torch.recurrence_layer"
"""The loop over steps that a recurrent layer became."""

CUDNN = CONVOLUTIONS | {LAYER_LOOP}
"""What cuDNN computes: convolutions, and the steps of recurrent layers."""

TF32: dict[str, frozenset[str]] = {"default": CUDNN, "highest": frozenset(), "high": CUDNN | GEMMS}
"""Precision mode to the operators that PyTorch computes in TF32 on a GPU.

As PyTorch ships, cuDNN uses TF32 (`torch.backends.cudnn.allow_tf32`) and matrix products do not. What
eager does a candidate may do: the judge's budget is a multiple of eager's own error in that mode.
"""


def precision_of(packets: Iterable[str], mode: str) -> str:
    """The mode that products of these operators are computed in: ``"high"`` where PyTorch takes TF32 for all of them.

    >>> precision_of(["aten.convolution"], "default"), precision_of(["aten.mm"], "default")
    ('high', 'default')
    """
    found = set(packets)
    return "high" if found and found <= TF32[mode] else mode


def mode_alone(packets: Iterable[str], mode: str) -> str:
    """The mode in which PyTorch computes these operators by themselves as it does in a network of mode `mode`.

    A recurrent layer's loop has matrix products where the layer has cuDNN's.

    >>> mode_alone([LAYER_LOOP, "aten.slice"], "default"), mode_alone(["aten.convolution"], "default")
    ('high', 'default')
    """
    return precision_of({LAYER_LOOP} & set(packets), mode)


def is_product(graph: OpGraph, node: Node) -> bool:
    """Whether it is computed as a matrix product: a gemm, or a convolution that sums over channels."""
    if category(node) == "convolution":
        return graph.meta(node.operands()[1]).shape[1] > 1
    return category(node) == "gemm"


def flops(graph: OpGraph, node: Node) -> int:
    """Multiply-adds counted twice for products and convolutions, one an output element otherwise; attention has two.

    What a causal attention leaves out does not count.
    """
    out = sum(m.numel for m in node.metas if m is not None)
    if category(node) == "convolution":
        weight = graph.meta(node.operands()[1])
        if is_transposed(node):  # every input element meets the whole kernel
            return 2 * graph.meta(node.operands()[0]).numel * math.prod(weight.shape[1:])
        return 2 * out * math.prod(weight.shape[1:])
    if category(node) == "gemm":
        matrix = [v for v in node.operands() if len(graph.meta(v).shape) >= 2]
        k = graph.meta(matrix[0]).shape[-1] if matrix else 1
        return 2 * out * k
    if category(node) == "attention":
        query, key, value = (graph.meta(v) for v in node.operands()[:3])
        rows, keys = query.shape[-2], key.shape[-2]
        causal = bool(dict(node.kwargs).get("is_causal", node.args[5] if len(node.args) > 5 else False))
        seen = sum(min(row + 1, keys) for row in range(rows)) if causal else rows * keys
        heads = query.numel // max(rows * query.shape[-1], 1)
        return 2 * heads * seen * (query.shape[-1] + value.shape[-1])
    return 0 if category(node) == "view" else out


def is_transposed(node: Node) -> bool:
    """Whether a convolution is a transposed one."""
    return node.packet == "aten.convolution" and len(node.args) > 6 and bool(node.args[6])


def longest_reduction(graph: OpGraph) -> int:
    """Most terms that one element of the result adds up: the largest over the graph's operators."""
    longest = 1
    for node in graph.ops():
        metas = [graph.meta(v) for v in node.operands() if graph.nodes[v.node].metas]
        out = max((m.numel for m in node.metas if m is not None), default=1)
        if not metas or not out:
            continue
        kind = category(node)
        if kind == "gemm":
            longest = max(longest, *(m.shape[-1] for m in metas if m.shape), 1)
        elif kind == "convolution":
            out_channels, per_group, *window = graph.meta(node.operands()[1]).shape
            channels = out_channels if is_transposed(node) else per_group  # those of one group: fewer still
            longest = max(longest, channels * math.prod(window))
        elif kind in ("reduction", "scan", "attention", "other"):
            rows = min((m.numel for m in node.metas if m is not None and m.numel), default=1)
            largest = max(metas, key=lambda m: m.numel)
            if rows == largest.numel:  # softmax, scans: as many results as terms, each a reduction over a dimension
                longest = max((longest, *largest.shape))
            longest = max(longest, largest.numel // max(rows, 1))
    return longest


__all__ = [
    "CONVOLUTIONS",
    "CUDNN",
    "EXACT",
    "GEMMS",
    "JUMPS",
    "LAYERS",
    "LAYER_LOOP",
    "POINTWISE",
    "RANDOM",
    "RESHAPES",
    "SCANS",
    "TF32",
    "VIEWS",
    "category",
    "flops",
    "is_product",
    "is_transposed",
    "longest_reduction",
    "mode_alone",
    "precision_of",
]
