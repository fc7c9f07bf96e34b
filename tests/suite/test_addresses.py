"""Kernels that reach for memory of others are seen in Triton's interpreter (`tests.addresses`).

The interpreter must be chosen before triton is imported, so the kernels run in a process of their own: this file as a
script.
"""

from __future__ import annotations

import json

from tests.interpreted import rows_of

KERNELS = """
import torch
import triton
import triton.language as tl


@triton.jit
def copied(x_ptr, y_ptr, n, first, BLOCK: tl.constexpr):
    i = first + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < 5)


def copy(x, y, n, first=0):
    copied[(1,)](x, y, n, first, BLOCK=8)
"""

CALLS = {
    "inside": ((5, 5, 5), ""),
    "a mask that is too wide": ((5, 5, 6), "1 of 6 elements lie in no tensor, 0 bytes past one"),
    "a result that is too small": ((5, 4, 5), "1 of 5 elements lie in no tensor, 0 bytes past one"),
    "before the first element": ((5, 5, 5, -1), "1 of 6 elements lie in no tensor"),
}


def test_memory_of_others_is_noticed() -> None:
    found = {row["call"]: row["error"] for row in rows_of("-m", "tests.suite.test_addresses")}
    assert set(found) == set(CALLS)
    for name, (_, words) in CALLS.items():
        assert words in found[name] if words else not found[name], (name, found[name])


def main() -> None:
    """Print a row a call."""
    import torch

    from qimeng.program.program import load_source
    from tests.addresses import watched

    copy = load_source(KERNELS, "suite_addresses").copy
    for name, ((given, made, *more), _) in CALLS.items():
        x, y, error = torch.ones(64)[32 : 32 + given], torch.zeros(64)[32 : 32 + made], ""
        try:
            with watched():
                copy(x, y, *more)
        except Exception as raised:  # noqa: BLE001 - the interpreter wraps it
            error = str(raised)
        print(json.dumps({"call": name, "error": error}))


if __name__ == "__main__":
    main()
