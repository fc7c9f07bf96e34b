"""Whose kernels did the work: names of kernels as the profiler tells them, and what a judge makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from qimeng.envs import gates
from qimeng.envs.clock import Clock
from qimeng.envs.crosscompile import Compiled
from qimeng.envs.gates import Run
from qimeng.envs.kernel_facts import KernelFacts
from qimeng.envs.launches import base_name, own_kernels, own_share
from qimeng.interfaces import Evaluation, Gate, Timing
from qimeng.program.program import Implementation, Program
from qimeng.testing import sample_graph

TRITON = Implementation("triton", "@triton.jit\ndef add(x):\n    pass\n\n\ndef entry(x):\n    return x\n", "entry")
GEMM = "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_cublas"


def compiled(name: str, launches: int = 1, prepares: bool = False) -> KernelFacts:
    return KernelFacts(name, prepares, (1, 1, 1), launches, 4, 128, 1, 0, None, None, 0)


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int)", None),
        ("void (anonymous namespace)::softmax_warp_forward<float, 3>(float*)", "softmax_warp_forward"),
        ("void cutlass::Kernel2<cutlass_80_tensorop>(cutlass_80_tensorop::Params)", "Kernel2"),
        ("mine(float*, int)", "mine"),
        (GEMM, GEMM),
    ],
)
def test_a_kernel_is_known_by_its_own_name(kernel, name):
    assert base_name(kernel) == (name or "vectorized_elementwise_kernel")


def test_kernels_of_a_program_come_from_the_compiler_or_from_its_text():
    done = Compiled((compiled("add", 2), compiled("pack", prepares=True)))
    assert own_kernels([(TRITON, done), (TRITON, done)]) == {"add": 4}
    assert own_kernels([(TRITON, Compiled(error="needs values", failure="meta"))]) == {"add": None}
    text = 'extern "C" __global__ void __launch_bounds__(256) mine(float* x) {}\n__global__ void other() {}'
    assert own_kernels([(Implementation("cuda", text, "entry"), None)]) == {"mine": None, "other": None}


def test_a_decoy_that_bears_the_name_of_a_librarys_kernel_counts_once():
    ran = [(GEMM, 0.0, 3.0), (GEMM, 3.0, 3.01), ("Memset (Device)", 4.0, 9.0)]
    assert own_share(ran, {GEMM: 1}) == pytest.approx(0.01 / 3.01)
    assert own_share([("Memset (Device)", 0.0, 5.0)], {"add": 1}) is None


def judged(
    launches: list[list[object]], ms: float = 9.0, alone: list[list[object]] | None = None
) -> tuple[Evaluation | None, Run]:
    """What the judge makes of a program of two regions that take the same time, one of them said to be generated.

    `alone` is what the profiler says where nobody else is on the device, if that is something else.
    """
    held: list[bool] = []

    @contextmanager
    def turn(part: str, clock: Clock, alone: bool = False) -> Iterator[None]:
        held.append(alone)
        yield
        held.pop()

    start = Program.start(sample_graph())
    program = start.with_implementation(start.regions[0].id, TRITON)
    owner = SimpleNamespace(limit_s=1.0, draw_seed=lambda: 1, turn=turn)
    run = Run(owner, program, None, "", lambda: [], Clock(), thorough=True)
    run.kernels[0] = {"add": 1}
    worker = SimpleNamespace(call=lambda *a, **k: (alone if alone is not None and held == [True] else launches, []))
    return run._proven(worker, 0, Evaluation(Gate.PASSED, timing=Timing(ms), generated_share=0.5)), run


def test_the_generated_share_is_that_of_the_programs_own_kernels():
    found, run = judged([["add", 0.0, 1.0], [GEMM, 1.0, 4.0], ["Memcpy DtoD", 4.0, 6.0]])
    assert found is not None and found.generated_share == 0.25 and run.refused == {}


def test_work_that_others_do_is_no_generated_kernel():
    found, run = judged([["add", 0.0, 0.01], [GEMM, 0.01, 2.01]])
    assert found is None and run.refused[0].failure == "not-a-kernel"
    assert "take 50% of the time, kernels of their own 0.5%" in run.refused[0].error


def test_kernels_that_run_where_the_events_do_not_see_them_are_refused():
    beside = [["add", 0.0, 1.0], ["add", 0.1, 1.0]]  # two streams, at the same time
    assert judged(beside, ms=1.0)[0] is not None
    found, run = judged([["add", 0.0, 1.0], ["add", 1.0, 2.0]], ms=1.0)
    assert found is None and run.refused[0].failure == "clock"
    assert run.refused[0].error == "events say 1.000 ms a call, the profiler's kernels take 2.000 ms"


def test_kernels_that_others_made_slower_are_looked_at_again_alone():
    found, run = judged([["add", 0.0, 2.0]], ms=1.0, alone=[["add", 0.0, 1.0]])
    assert found is not None and run.refused == {} and found.generated_share == 1.0
    found, run = judged([["add", 0.0, 0.01], [GEMM, 0.01, 2.01]], alone=[["add", 0.0, 1.0], [GEMM, 1.0, 2.0]])
    assert found is not None and run.refused == {} and found.generated_share == 0.5


def test_where_the_profiler_says_nothing_that_is_said():
    found, _ = judged([])
    assert found is not None and found.notes == (gates.UNPROVEN,)


def test_without_a_gpu_no_kernels_are_listed():
    from qimeng.envs.worker import Worker
    from qimeng.spec import KernelSpec

    worker = Worker(KernelSpec.from_function(torch.relu, (torch.ones(4),)), torch.device("cpu"))
    assert worker.launches(1) == []
