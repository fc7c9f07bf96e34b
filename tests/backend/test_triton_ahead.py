"""Kernels that children compiled are found in the cache, and what fails says so as it would have without them.

A process that compiles stands for a device from then on, so each way has one of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.interpreted import rows_of

TEXT = """
@triton.jit
def first(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i) + 1)


@triton.jit
def second(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.exp({value}))


def run(x0):
    y, z = torch.empty_like(x0), torch.empty_like(x0)
    first[(1,)](x0, y, N=64)
    second[(1,)](y, z, N=64)
    second[(1,)](y, z, N=64)
    return (z,)
"""


VALUES = {"right": "tl.load(x_ptr + i)", "wrong": "tl.nothing(x_ptr)"}
CODE = """
import json
import os
os.environ['TRITON_CACHE_DIR'] = {cache}
from qimeng.backend import triton_ahead, triton_compile
from qimeng.device import device_named
from qimeng.graph.opgraph import Meta
from qimeng.program.implementation import Implementation

triton_compile.worth_it = lambda: {ahead}
forked, fork = [], triton_ahead.os.fork
triton_ahead.os.fork = lambda: (forked.append(1), fork())[1]
head = 'import torch\\nimport triton\\nimport triton.language as tl\\n'
for text in {texts}:
    forked.clear()
    made = Implementation('triton', text, 'run')
    found = triton_compile.compile_here(made, head, [Meta((64,), (1,), 'float32')], device_named('h100'))
    kernels = [(k.name, k.launches) for k in found.kernels]
    print(json.dumps(dict(error=found.error, line=found.line, kernels=kernels, forked=len(forked))))
"""


def compiled(ahead: bool, folder: Path) -> list[dict[str, Any]]:
    texts = [TEXT.format(value=value) for value in VALUES.values()]
    script = folder / f"{ahead}.py"
    script.write_text(CODE.format(ahead=ahead, texts=texts, cache=repr(str(folder / str(ahead)))))
    return rows_of(str(script), interpret=False)


def test_kernels_compiled_by_children_are_those_of_this_process(tmp_path: Path) -> None:
    alone, ahead = (compiled(forks, tmp_path) for forks in (False, True))
    assert [row.pop("forked") for row in alone] == [0, 0] and [row.pop("forked") for row in ahead] == [2, 2]
    assert alone == ahead
    assert [row["error"] is None for row in alone] == [True, False]
    binaries = [sorted(p.name for p in (tmp_path / str(f)).rglob("*.cubin")) for f in (False, True)]
    assert binaries[0] == binaries[1] and len(binaries[0]) == 2
