"""Whose kernels did the work: names of kernels as the profiler tells them, and what a judge makes of them."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qimeng.backend.compiled import Compiled
from qimeng.backend.facts import KernelFacts
from qimeng.device import DEVICES
from qimeng.envs.judge.gates import own_kernels as own_kernels_gate
from qimeng.envs.judge.gates.gpu_run import GpuRun
from qimeng.envs.judge.gates.own_kernels import LOOKS, OWN_KERNELS, UNPROVEN
from qimeng.envs.judge.gates.pipeline import Candidate, Refusal
from qimeng.envs.judge.idle_kernels import idle_text, with_idle_kernels
from qimeng.envs.judge.kernel_renaming import with_secret_names
from qimeng.envs.judge.time_spent import Clock
from qimeng.envs.judge.verdicts import Verdict
from qimeng.envs.workers.forkserver import WorkerFailed
from qimeng.envs.workers.kernel_launches import base_name, own_kernels, own_share
from qimeng.envs.workers.worker_setup import Draw
from qimeng.interfaces import Accuracy, Evaluation, Gate, Timing
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
) -> tuple[Evaluation, Refusal | None]:
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

    def profiled(worker: object, draw: object, timeout_s: float) -> tuple[list[list[object]], Verdict]:
        return (alone if alone is not None and held == [True] else launches), Verdict(
            failure=wrong and "wrong", error=wrong
        )

    run, candidate = timed_run(program, profiled, turn, {"add": 1}, ms)
    refusal = OWN_KERNELS.check(run, candidate)
    assert candidate.found is not None
    return candidate.found, refusal


def timed_run(
    program: Program, profiled: Any, turn: Any, own: dict[str, int | None], ms: float = 9.0, **parts: Any
) -> tuple[GpuRun, Candidate]:
    """An evaluation whose program was found right and timed; a final verification where compilers are given."""
    numbers = count()
    equipment: Any = SimpleNamespace(
        limit_s=1.0,
        turns=SimpleNamespace(turn=turn),
        judge=SimpleNamespace(profiled=profiled, launches=lambda *arguments: profiled(*arguments)[0]),
        references=SimpleNamespace(timed_draw=lambda: Draw(next(numbers))),
    )
    compilers, worker = parts.get("compilers"), parts.get("worker", SimpleNamespace())
    device: Any = DEVICES["h200"]
    rounds: Any = None
    run = GpuRun(
        program,
        None,
        compilers,
        device,
        "off",
        True,
        Clock(),
        equipment,
        "",
        lambda: [],
        rounds,
        thorough=parts.get("thorough", compilers is not None),
    )
    run.loaded, (candidate,) = worker, run.candidates
    candidate.own, candidate.found = own, Evaluation(Gate.PASSED, timing=Timing(ms), generated_share=0.5)
    return run, candidate


def test_the_generated_share_is_that_of_the_programs_own_kernels():
    found, refusal = judged([["add", 0.0, 1.0], [GEMM, 1.0, 4.0], ["Memcpy DtoD", 4.0, 6.0]])
    assert found.generated_share == 0.25 and refusal is None


def test_work_that_others_do_is_no_generated_kernel():
    _, refusal = judged([["add", 0.0, 0.01], [GEMM, 0.01, 2.01]])
    assert refusal is not None and refusal.failure == "not-a-kernel"
    assert "take 50% of the time, but their own kernels only 0.5%" in refusal.error


def test_kernels_that_run_where_the_events_do_not_see_them_are_refused():
    beside = [["add", 0.0, 1.0], ["add", 0.1, 1.0]]  # two streams, at the same time
    assert judged(beside, ms=1.0)[1] is None
    _, refusal = judged([["add", 0.0, 1.0], ["add", 1.0, 2.0]], ms=1.0)
    assert refusal is not None and refusal.failure == "clock"
    assert refusal.error == "events say 1.000 ms a call, the profiler's kernels take 2.000 ms"


def test_kernels_that_others_made_slower_are_looked_at_again_alone():
    found, refusal = judged([["add", 0.0, 2.0]], ms=1.0, alone=[["add", 0.0, 1.0]])
    assert refusal is None and found.generated_share == 1.0
    found, refusal = judged([["add", 0.0, 0.01], [GEMM, 0.01, 2.01]], alone=[["add", 0.0, 1.0], [GEMM, 1.0, 2.0]])
    assert refusal is None and found.generated_share == 0.5


@pytest.mark.parametrize(
    ("slow", "trusted"),
    [(0, True), (1, True), (LOOKS, True), (LOOKS + 1, True), (0, False), (1, False), (2, False)],
)
def test_a_program_that_is_slower_on_some_inputs_takes_what_it_takes_on_most(slow, trusted, monkeypatch):
    """A convolution whose exact way is taken where one number of an image is too small for its planes."""
    looks = LOOKS if trusted else 1
    monkeypatch.setattr(own_kernels_gate, "printed", lambda program: trusted)
    start = Program.start(sample_graph())
    seen: list[tuple[Draw, bool]] = []
    held: list[bool] = []

    @contextmanager
    def turn(part: str, clock: Clock, alone: bool = False) -> Iterator[None]:
        held.append(alone)
        yield
        held.pop()

    def profiled(worker: object, draw: Draw, timeout_s: float) -> tuple[list[tuple[str, float, float]], Verdict]:
        seen.append((draw, held == [True]))
        return [("add", 0.0, 4.5 if draw.seed < slow else 1.0)], Verdict()

    program = start.with_implementation(start.regions[0].id, TRITON)
    refusal = OWN_KERNELS.check(*timed_run(program, profiled, turn, {"add": 1}, ms=1.0))
    assert (refusal is not None) == (slow > looks)
    if slow in (1, looks):
        (quick, _), (checked, _) = seen[-2:]
        assert quick == checked, "the call that agrees is made again and checked"
    assert [alone for _, alone in seen] == [False, *[True] * (len(seen) - 1)]
    assert len({draw.seed for draw, _ in seen}) == min(slow, looks) + 1


def test_where_the_profiler_says_nothing_that_is_said():
    found, refusal = judged([])
    assert refusal is None and found.notes == (UNPROVEN,)


def test_a_profiled_call_is_checked_like_any_other():
    assert judged([["add", 0.0, 1.0]], wrong="zeros")[1] == Refusal(Gate.TIMING, "wrong", "zeros")


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


@pytest.mark.parametrize("thorough", [True, False])
def test_a_name_proves_nothing(thorough):
    """In a final verification, and in a search where nobody knows how often a kernel is launched.

    The text's kernel is called like a library's, whose own do the work: only those of secret names count.
    """
    start = Program.start(sample_graph())
    lying = Implementation("triton", TRITON.source.replace("add", GEMM), "entry")
    program = start.with_implementation(start.regions[0].id, lying)
    loaded: list[str] = []

    def profiled(worker: object, draw: object, timeout_s: float) -> tuple[list[tuple[str, float, float]], Verdict]:
        decoy = next(line for line in loaded[-1].splitlines() if line.startswith("def k"))[4:].partition("(")[0]
        return [(decoy, 0.0, 0.01), (GEMM, 0.1, 3.0)], Verdict()

    def refused(**made: Compiled) -> Refusal:
        run, candidate = timed_run(
            program,
            profiled,
            lambda *a, **k: nullcontext(),
            {GEMM: None},
            worker=SimpleNamespace(call=lambda name, limit_s, source, digests: loaded.append(source)),
            compilers=SimpleNamespace(programs=lambda programs: [made]),
            thorough=thorough,
        )
        refusal = OWN_KERNELS.check(run, candidate)
        assert refusal is not None
        return refusal

    found = refused()
    assert found.failure == "not-a-kernel" and "their own kernels only 0.3%" in found.error
    found = refused(a=Compiled(error="no such name", failure="compile"))
    assert found.error.endswith("name a kernel only where it is defined and launched: no such name")


def test_without_a_gpu_no_kernels_are_listed():
    from qimeng.envs.workers.worker import Worker
    from qimeng.envs.workers.worker_setup import Draw
    from qimeng.spec import KernelSpec

    worker = Worker(KernelSpec.from_function(torch.relu, (torch.ones(4),)), torch.device("cpu"))
    answer = worker.launches(Draw(1))
    for fd in answer.files:
        os.close(fd)
    assert answer.data["kernels"] == [] and len(answer.data["tensors"]) == 1


IN_C = '''
SOURCE = r"""
__device__ float twice(float x) { return 2 * x; }
extern "C" __global__ void __launch_bounds__(256) mine(float (*x), int n)
{
    if (n > 0) { x[0] = twice(x[0]); }
}
"""
def entry(x):
    load(SOURCE, "mine")(x)
    return (x,)
'''


def test_an_idle_kernel_returns_at_once_and_the_rest_is_as_it_was():
    text = (
        "@triton.jit\ndef mine(x):\n    'adds'\n    tl.store(x, 1)\n\ndef entry(x):\n    mine[(1,)](x)\n    return (x,)"
    )
    idle = idle_text(Implementation("triton", text, "entry"))
    assert idle == ast.unparse(ast.parse(text.replace("    'adds'\n    tl.store(x, 1)", "    return")))
    names: dict[str, Any] = {}
    exec(idle_text(Implementation("cuda", IN_C, "entry")) or "", names)
    given: dict[str, Any] = {}
    exec(IN_C, given)
    assert names["SOURCE"] == given["SOURCE"].replace("int n)\n{", "int n)\n{return;")
    lost = IN_C.replace("mine(float (*x), int n)", 'mine(""" + PARAMETERS + r""")')
    assert idle_text(Implementation("cuda", lost, "entry")) is None, "its beginning is not found"
    assert idle_text(Implementation("triton", "def entry(x):\n    return (x,)", "entry")) is None, "it has no kernels"


def test_a_templates_kernels_are_not_made_idle():
    start = Program.start(sample_graph())
    assert list(with_idle_kernels(start)) == []
    (idle,) = with_idle_kernels(start.with_implementation(start.regions[0].id, TRITON))
    assert "return" in idle.implementation(idle.regions[0]).source
    assert idle.implementation(idle.regions[1]) == start.implementation(start.regions[1])


@pytest.mark.parametrize(
    ("idle", "refused"),
    [
        (Verdict(Accuracy(0, 0, 1, 1, None, "float64", 1)), True),
        (Verdict(Accuracy(0, 0, 1, 1, None, "float64", 0)), False),  # no trial could be made
        (Verdict(failure="wrong", error="NaN"), False),
        (WorkerFailed("illegal-access", "an illegal memory access"), False),
    ],
)
def test_a_kernel_that_takes_as_long_as_the_work_of_others_is_refused_if_nothing_needs_it(idle, refused):
    start = Program.start(sample_graph())
    program = start.with_implementation(start.regions[0].id, TRITON)
    loaded: list[str] = []

    def profiled(worker: object, draw: object, timeout_s: float) -> tuple[list[tuple[str, float, float]], Verdict]:
        name = next(line for line in loaded[-1].splitlines() if line.startswith("def k"))[4:].partition("(")[0]
        return [(name, 0.0, 1.5), (GEMM, 1.5, 3.0)], Verdict()

    def check(worker: object, trials: object, runs: int) -> Verdict:
        if isinstance(idle, Exception):
            raise idle
        return idle

    worker = SimpleNamespace(
        alive=True, kill=lambda: None, call=lambda name, limit_s, source, digests: loaded.append(source)
    )
    run, candidate = timed_run(
        program,
        profiled,
        lambda *a, **k: nullcontext(),
        {"add": 1},
        worker=worker,
        compilers=SimpleNamespace(programs=lambda programs: [{}]),
    )
    run.worker = worker
    run.parts.workers = SimpleNamespace(let_go=lambda process: None)
    run.parts.judge.check, run.parts.judge.references = check, SimpleNamespace(fresh=lambda count: [])
    refusal = OWN_KERNELS.check(run, candidate)
    assert (refusal is not None) == refused and len(loaded) == 2
    assert refusal is None or (refusal.failure == "not-a-kernel" and "do nothing" in refusal.error)
