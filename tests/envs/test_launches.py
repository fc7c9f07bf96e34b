"""Whose kernels did the work: names of kernels as the profiler tells them, and what a judge makes of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from qimeng.backend.compiled import Compiled
from qimeng.backend.facts import KernelFacts
from qimeng.envs.judge import gates
from qimeng.envs.judge.gates import Run
from qimeng.envs.judge.kernel_renaming import with_secret_names
from qimeng.envs.judge.time_spent import Clock
from qimeng.envs.judge.verdicts import Verdict
from qimeng.envs.workers.kernel_launches import base_name, own_kernels, own_share
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
    launches: list[list[object]],
    ms: float = 9.0,
    alone: list[list[object]] | None = None,
    wrong: str | None = None,
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

    def profiled(worker: object, timeout_s: float) -> tuple[list[list[object]], Verdict]:
        return (alone if alone is not None and held == [True] else launches), Verdict(
            failure=wrong and "wrong", error=wrong
        )

    owner = SimpleNamespace(limit_s=1.0, turn=turn, judge=SimpleNamespace(profiled=profiled))
    run = Run(owner, program, None, "", lambda: [], Clock(), thorough=True)
    run.kernels[0] = {"add": 1}
    return run._proven(None, 0, Evaluation(Gate.PASSED, timing=Timing(ms), generated_share=0.5)), run


def test_the_generated_share_is_that_of_the_programs_own_kernels():
    found, run = judged([["add", 0.0, 1.0], [GEMM, 1.0, 4.0], ["Memcpy DtoD", 4.0, 6.0]])
    assert found is not None and found.generated_share == 0.25 and run.refused == {}


def test_work_that_others_do_is_no_generated_kernel():
    found, run = judged([["add", 0.0, 0.01], [GEMM, 0.01, 2.01]])
    assert found is None and run.refused[0].failure == "not-a-kernel"
    assert "take 50% of the time, but their own kernels only 0.5%" in run.refused[0].error


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


def test_a_profiled_call_is_checked_like_any_other():
    found, run = judged([["add", 0.0, 1.0]], wrong="zeros")
    assert found is None and run.refused[0] == gates.Refusal(Gate.TIMING, "wrong", "zeros")


def test_kernels_get_names_that_nobody_knew_wherever_they_stand():
    source = (
        "import triton\n@triton.jit\ndef add(x):\n    pass\n\n\n"
        "def entry(x):\n    add[(1,)](x)\n    badd = add2 = x\n    return (torch.add(x, badd), 'add')\n"
    )
    start = Program.start(sample_graph())
    program = start.with_implementation(start.regions[0].id, Implementation("triton", source, "entry"))
    renamed, own = with_secret_names(program)
    (name,) = own
    assert own[name] is None and name not in program.source
    text = renamed.implementation(renamed.regions[0]).source
    assert f"def {name}(x)" in text and f"{name}[(1,)](x)" in text and f"'{name}'" in text
    assert "torch.add(x, badd)" in text and "badd = add2 = x" in text
    assert with_secret_names(program)[1].keys() != own.keys()
    text = (
        'KERNEL = r"""extern "C" __global__ void mine(float* x) {}"""\ndef entry(x):\n    return load(KERNEL, "mine")\n'
    )
    cuda = start.with_implementation(start.regions[0].id, Implementation("cuda", text, "entry"))
    renamed, own = with_secret_names(cuda)
    assert renamed.implementation(renamed.regions[0]).source == text.replace("mine", next(iter(own)))


def test_in_a_final_verification_a_name_proves_nothing():
    """The text's kernel is called like a library's, whose own do the work: only those of secret names count."""
    start = Program.start(sample_graph())
    lying = Implementation("triton", TRITON.source.replace("add", GEMM), "entry")
    program = start.with_implementation(start.regions[0].id, lying)
    loaded: list[str] = []

    def profiled(worker: object, timeout_s: float) -> tuple[list[tuple[str, float, float]], Verdict]:
        decoy = next(line for line in loaded[-1].splitlines() if line.startswith("def k"))[4:].partition("(")[0]
        return [(decoy, 0.0, 0.01), (GEMM, 0.1, 3.0)], Verdict()

    owner = SimpleNamespace(limit_s=1.0, turn=lambda *a, **k: nullcontext(), judge=SimpleNamespace(profiled=profiled))
    worker = SimpleNamespace(call=lambda name, limit_s, source, digests: loaded.append(source))
    run = Run(owner, program, None, "", lambda: [], Clock(), thorough=True)
    run.kernels[0] = {GEMM: None}
    run.compilers = SimpleNamespace(programs=lambda programs: [{}])
    found = Evaluation(Gate.PASSED, timing=Timing(9.0), generated_share=0.5)
    assert run._proven(worker, 0, found) is None
    assert run.refused[0].failure == "not-a-kernel" and "their own kernels only 0.3%" in run.refused[0].error
    run.compilers = SimpleNamespace(
        programs=lambda programs: [{"a": Compiled(error="no such name", failure="compile")}]
    )
    assert run._proven(worker, 0, found) is None
    assert run.refused[0].error.endswith("name a kernel only where it is defined and launched: no such name")


def test_without_a_gpu_no_kernels_are_listed():
    from qimeng.envs.workers.worker import Draw, Worker
    from qimeng.spec import KernelSpec

    worker = Worker(KernelSpec.from_function(torch.relu, (torch.ones(4),)), torch.device("cpu"))
    answer = worker.launches(Draw(1))
    for fd in answer.files:
        os.close(fd)
    assert answer.data["kernels"] == [] and len(answer.data["tensors"]) == 1
