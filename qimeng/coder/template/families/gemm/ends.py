"""The small kernels after a product: the sum of a split depth, the end of a reduction.

Deals in kernel text. Knows nothing about the product's own loop.
"""

from __future__ import annotations

from qimeng.coder.template.families.gemm.frame import COLLECT, Frame, Kernel
from qimeng.coder.template.nest.sizes import power_of_two


def collect(k: Frame) -> Kernel:
    """The kernel that sums the parts of a split depth, with the epilogue."""
    batch, m, n, _ = k.plan.shape
    gm, gn = k.epilogue.grid
    body = ["t = tl.program_id(0)"]
    if k.plan.batch:
        body += [f"z = t // {gm * gn}", f"t = t % {gm * gn}"]
    row = f"(z * {m} + rm)" if k.plan.batch else "rm"
    row += ".to(tl.int64)" if batch * m * n >= 1 << 31 else ""
    body += [
        f"row0 = t // {gn} * BM",
        f"col0 = t % {gn} * BN",
        *k.epilogue.positions(),
        f"at = parts_ptr + {row} * {n} + rn",
    ]
    bm, bn = k.epilogue.bm, k.epilogue.bn
    at_once = min(power_of_two(k.splits), max(1, COLLECT[0] * COLLECT[1] // 2 // (bm * bn)))
    body += _sum_in_turn(k) if at_once == 1 else _sum_at_once(k, at_once)
    body.append(k.epilogue_call("acc", "col0", "BN"))
    parameters = ["parts_ptr", *k.epilogue_parameters()]
    doc = "Sum the parts of the depth, then the epilogue."
    sizes = {"BM": bm, "BN": bn} | ({"BP": at_once} if at_once > 1 else {})
    return k.kernel("collect", doc, parameters, sizes, body, str(gm * gn * batch), "num_warps=4")


def finish(k: Frame) -> Kernel:
    """The kernel that merges the tiles' parts of a reduction."""
    body, rows, width = k.epilogue.finish()
    outputs = [f"y{i}_ptr" for i in k.plan.finals]
    parameters = ["work_ptr", *k.tensors(k.epilogue.final_sources()), *outputs]
    sizes, warps = {"PB": rows, "SP": width}, 4 if rows * width <= 8192 else 16
    grid = str(-(-k.epilogue.kept // rows))
    doc = "Merge the tiles' partial reductions."
    return k.kernel("finish", doc, parameters, sizes, body, grid, f"num_warps={warps}")


def _sum_in_turn(k: Frame) -> list[str]:
    """Lines that sum the parts at `at` one by one."""
    batch, m, n, _ = k.plan.shape
    return [
        "acc = tl.zeros([BM, BN], tl.float32)",
        f"for part in range({k.splits}):",
        f"    acc += tl.load(at{k.mask(k.epilogue)}{', other=0.0' if k.epilogue.masks() else ''})",
        f"    at += {batch * m * n}",
    ]


def _sum_at_once(k: Frame, at_once: int) -> list[str]:
    """Lines that sum the parts at `at`, `BP` of them in flight."""
    batch, m, n, _ = k.plan.shape
    inside = [f"({mask})[None, :, :]" for mask in k.epilogue.masks().values()]
    inside += [f"(part + lane < {k.splits})"] if k.splits % at_once else []
    guard = f", mask={' & '.join(inside)}, other=0.0" if inside else ""
    return [
        "lane = tl.arange(0, BP)[:, None, None]",
        f"at = at[None, :, :] + lane * {batch * m * n}",
        "sums = tl.zeros([BP, BM, BN], tl.float32)",
        f"for part in range(0, {k.splits}, BP):",
        f"    sums += tl.load(at{guard})",
        f"    at += BP * {batch * m * n}",
        "acc = tl.sum(sums, axis=0)",
    ]


__all__ = ["collect", "finish"]
