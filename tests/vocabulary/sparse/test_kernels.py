"""What is printed for kept blocks, and what the compiler makes of it for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import covering
from qimeng.interfaces import Request
from qimeng.vocabulary.sparse.schedules import SparseSchedule
from tests.vocabulary.sparse.samples import CONTEXT, Turned, action_of, after, layer, reading, spec_of, start_of


@pytest.mark.parametrize(
    ("name", "weights", "rows", "choice"),
    [
        ("bsr", "bsr:32:20", 8, 0),
        ("csr", "csr:5", 8, 0),
        ("csr_shared", "csr:5", 72, 5),
        ("csr_few_rows", "csr:5", 3, 0),
    ],
)
def test_the_printed_kernel(
    name: str, weights: str, rows: int, choice: int, golden: Callable[[str, str], None]
) -> None:
    module, x = layer(rows, 200, 100, torch.bfloat16, after=nn.SiLU())
    start = start_of(spec_of(module, x, weights))
    fused = after(start, action_of(start, "fusion"))
    program = after(fused, action_of(fused, "sparsify"), choice)
    golden(f"{name}.py.txt", program.implementation(reading(program)).source)


def test_what_lies_transposed_is_read_where_it_lies() -> None:
    spec = spec_of(Turned(nn.Linear(64, 48)).to(torch.float16), torch.randn(64, 24).half(), "csr:5")
    start = start_of(spec)
    program = after(start, action_of(start, "sparsify"))
    made = program.implementation(reading(program))
    assert isinstance(made.schedule, SparseSchedule) and made.schedule.transposed
    assert "_pack_a" not in made.source and "b_k * 24 + rm" in made.source


@pytest.mark.parametrize(
    ("weights", "rows", "choice", "dtype"),
    [
        ("bsr:16:10", 8, 0, torch.bfloat16),
        ("bsr:64:10", 8, 5, torch.bfloat16),
        ("csr:5", 8, 5, torch.bfloat16),
        ("bsr:64:10", 2048, 0, torch.bfloat16),
        ("csr:5", 2048, 0, torch.bfloat16),
        ("bsr:16:10", 64, 1, torch.float32),
        ("csr:5", 64, 1, torch.float32),
    ],
)
def test_it_compiles_and_takes_what_it_is_said_to(
    weights: str, rows: int, choice: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    module, x = layer(rows, 512, 512, dtype, bias=False)
    start = start_of(spec_of(module, x, weights))
    patch = CONTEXT.coder.write(Request(start, action_of(start, "sparsify"), CONTEXT.device))
    region, made = reading(patch.apply(start)), patch.alternatives[min(choice, len(patch.alternatives) - 1)]
    compilers = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0)
    (found,) = compilers.compile([job_of(region, made)])
    assert found.error is None
    product = next(kernel for kernel in found.kernels if kernel.name.endswith("_product"))
    family, plan = covering(region)
    said = family.needs(plan, made.schedule).shared_bytes
    assert product.spills == 0 and not product.overlaps
    exact = dtype is torch.bfloat16 and weights != "csr:5"
    assert product.shared_bytes == said if exact else product.shared_bytes <= said


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 512])
def test_loops_over_single_elements_pass_nothing_through_shared_memory(rows: int, tmp_path: Path) -> None:
    module, x = layer(rows, 1024, 1024, torch.bfloat16, bias=False)
    start = start_of(spec_of(module, x, "csr:3"))
    patch = CONTEXT.coder.write(Request(start, action_of(start, "sparsify"), CONTEXT.device))
    region, turned = reading(patch.apply(start)), [m for m in patch.alternatives if m.schedule.transposed]
    compilers = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0)
    for found, made in zip(compilers.compile([job_of(region, m) for m in turned]), turned, strict=True):
        assert found.error is None and isinstance(made.schedule, SparseSchedule)
        assert not any(k.spills or k.overlaps for k in found.kernels)
    texts = [path.read_text() for path in tmp_path.rglob("*.ttgir") if "_pack_a" not in path.name]
    loops = [text.split("scf.for", 1)[1].split("scf.yield", 1)[0] for text in texts if "scf.for" in text]
    assert len(loops) == len(turned) + 2 and all("tt.load" in loop for loop in loops)  # two have a kernel before
    assert not any("convert_layout" in loop for loop in loops)


@pytest.mark.parametrize("rows", [16, 512])
def test_tunings_keep_to_what_threads_load_themselves(rows: int) -> None:
    module, x = layer(rows, 1024, 1024, torch.bfloat16, bias=False)
    start = start_of(spec_of(module, x, "csr:3"))
    patch = CONTEXT.coder.write(Request(start, action_of(start, "sparsify"), CONTEXT.device))
    family, plan = covering(reading(patch.apply(start)))
    for made in patch.alternatives[:-1]:
        for param in ("taller", "wider", "deeper", "smaller"):
            for s in family.moves["tiling"].schedules(plan, made.schedule, param, CONTEXT.device):
                assert s.block_k * (1 if s.share else s.block_n) < 32 * s.warps
        more = family.moves["split"].schedules(plan, made.schedule, "more", CONTEXT.device)
        assert all(s.share < made.schedule.share for s in more) if made.schedule.share else more[0].share == 512
    fewer = family.moves["split"].schedules(plan, made.schedule, "fewer", CONTEXT.device)
    assert [s.share for s in fewer] == [made.schedule.share * 2, made.schedule.share * 4, 0]
