"""What is printed for stored weights, and what the compiler makes of it for Hopper."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import covering
from qimeng.interfaces import Request
from qimeng.vocabulary.lowprecision.reading import halves
from tests.vocabulary.lowprecision.samples import CONTEXT, action_of, after, layer, reading, spec_of, start_of


@pytest.mark.parametrize(
    ("name", "weights", "depth"),
    [("int8", "int8", 512), ("fp8", "fp8", 200), ("int4", "int4", 512), ("int4_small_groups", "int4:32", 200)],
)
def test_the_printed_kernel(name: str, weights: str, depth: int, golden: Callable[[str, str], None]) -> None:
    module, x = layer(8, depth, 100, torch.bfloat16, after=nn.SiLU())
    start = start_of(spec_of(module, x, weights))
    fused = after(start, action_of(start, "fusion"))
    program = after(fused, action_of(fused, "dequantize"))
    golden(f"{name}.py.txt", program.implementation(reading(program)).source)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_instructions_make_the_number_of_each_half(dtype: str) -> None:
    """The assembly is carried out on all bytes, an instruction at a time."""
    (text,) = re.findall(r'"(// nibbles.*?)"', halves("k", dtype))
    found = np.empty((256, 2), dtype=np.float32)
    for first in range(0, 256, 4):
        registers = {"$4": int.from_bytes(bytes(range(first, first + 4)), "little")}
        for line in re.split(r"[;\n]|\\n", text.split("s;", 1)[1]):
            carry_out(line.strip(), registers, dtype)
        for number in range(4):
            low, high = (
                pair[number % 2 * 2 :][:2] for pair in (found[first : first + 4, 0], found[first : first + 4, 1])
            )
            (low if number < 2 else high)[:] = values_of(registers[f"${number}"], dtype)
    codes = np.arange(256)
    assert (found[:, 0] == (codes % 16 ^ 8) - 8).all() and (found[:, 1] == (codes // 16 ^ 8) - 8).all()


def values_of(register: int, dtype: str) -> torch.Tensor:
    """The two half numbers of a register."""
    bits = torch.tensor([register & 0xFFFF, register >> 16]).to(torch.uint16)
    return bits.view(getattr(torch, dtype)).float()


def carry_out(line: str, registers: dict[str, int], dtype: str) -> None:
    """One of the few PTX instructions that the text has."""
    if not line or line == "}":
        return
    name, *operands = line.replace(",", " ").split()
    target, values = operands[0], [registers[o] if o in registers else int(o, 0) for o in operands[1:]]
    if name == "mov.b32":
        result = values[0]
    elif name == "shr.u32":
        result = values[0] >> values[1]
    elif name == "lop3.b32":
        a, b, c, table = values
        picked = [(table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32)]
        result = sum(picked)
    elif name == "prmt.b32":
        both = (values[0] | values[1] << 32).to_bytes(8, "little")
        result = int.from_bytes(bytes(both[values[2] >> 4 * i & 7] for i in range(4)), "little")
    else:
        assert name.startswith("fma.rn."), name
        x, y, z = (values_of(v, dtype) for v in values)
        half = (x * y + z).to(getattr(torch, dtype)).view(torch.uint16).tolist()
        result = half[0] | half[1] << 16
    registers[target] = result


@pytest.mark.parametrize(
    ("weights", "rows", "choice"),
    [
        ("int8", 1, 0),
        ("int4", 1, 0),
        ("int4", 1, 4),
        ("int4", 1, 6),
        ("fp8", 8, 0),
        ("int8", 8, 2),
        ("int4", 64, 0),
        ("int8", 2048, 0),
        ("int4", 2048, 0),
        ("fp8", 2048, 0),
        ("fp8:128x128", 8, 0),
        ("fp8:128x128", 2048, 0),
    ],
)
def test_it_compiles_and_takes_what_it_is_said_to(weights: str, rows: int, choice: int, tmp_path: Path) -> None:
    module, x = layer(rows, 4096, 1024, torch.bfloat16, bias=False)
    start = start_of(spec_of(module, x, weights))
    action = action_of(start, "dequantize")
    patch = CONTEXT.coder.write(Request(start, action, CONTEXT.device))
    region, made = reading(patch.apply(start)), patch.alternatives[choice]
    compilers = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0)
    (found,) = compilers.compile([job_of(region, made)])
    assert found.error is None
    product = next(kernel for kernel in found.kernels if kernel.name.endswith("_product"))
    family, plan = covering(region)
    assert product.spills == 0 and not product.overlaps
    assert family.needs(plan, made.schedule).shared_bytes == pytest.approx(product.shared_bytes, rel=0.01)
