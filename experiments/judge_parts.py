"""Where the seconds and the memory of a final verification go: by part, by function of the judge, at the peak.

    python -m experiments.judge_parts product --size 4096
    python -m experiments.judge_parts convolution --size 1024 --hold 20
    python -m experiments.judge_parts pointwise --size 16384 --inside

Deals in one program on PyTorch of one specification. Knows nothing about searches.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import nn

from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.judge.reference import References
from qimeng.envs.workers.forkserver import Process
from qimeng.envs.workers.worker import Worker
from qimeng.envs.workers.worker_setup import Draw
from qimeng.interfaces import Asked, Evaluation, EvaluationRequest
from qimeng.program.program import Implementation, Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec
from qimeng.spec.distributions import EXAMPLES

SHOWN = 40
"""Functions that are listed."""
GIB = 1 << 30


def product(size: int) -> tuple[KernelSpec, str]:
    """A product of two square matrices."""
    spec = KernelSpec.from_function(lambda x, y: x @ y, (torch.randn(size, size), torch.randn(size, size)))
    return spec, "def entry(x, y):\n    return (x @ y,)\n"


def convolution(size: int) -> tuple[KernelSpec, str]:
    """A pointwise convolution of 16 images; of 1024 x 1024 pixels it is KernelBench's level 1, problem 87."""
    spec = KernelSpec.from_module(nn.Conv2d(64, 128, 1, bias=False), (torch.randn(16, 64, size, size),))
    return spec, "import torch\ndef entry(x, w):\n    return (torch.nn.functional.conv2d(x, w),)\n"


def pointwise(size: int) -> tuple[KernelSpec, str]:
    """A function of each element of a square matrix."""
    spec = KernelSpec.from_module(nn.ReLU(), (torch.randn(size, size),))
    return spec, "import torch\ndef entry(x):\n    return (torch.relu(x),)\n"


CASES: dict[str, Callable[[int], tuple[KernelSpec, str]]] = {f.__name__: f for f in (product, convolution, pointwise)}


def judged(evaluator: GpuEvaluator, text: str) -> tuple[Evaluation, cProfile.Profile]:
    """The final verification of a program that computes everything by `text`, and a profile of the judge's process."""
    assert evaluator.graph is not None
    program, spec = Program.start(evaluator.graph), evaluator.spec
    program = program.with_implementation(program.regions[0].id, Implementation("torch", text, "entry"))
    request = EvaluationRequest(program, None, Asked.FINAL, spec.digest, evaluator.device.name, spec.mode)
    profile = cProfile.Profile()
    with profile:
        found = evaluator.answer(request)
    return found, profile


@contextmanager
def commands_timed() -> Iterator[dict[str, list[float]]]:
    """Yields, for each command of a worker, the seconds that the judge waited for its answers inside."""
    seconds: dict[str, list[float]] = {}
    send, answer = Process.send, Process.answer
    asked: dict[int, tuple[str, float]] = {}

    def sent(self: Process, command: str, **arguments: Any) -> None:
        asked[id(self)] = command, time.monotonic()
        send(self, command, **arguments)

    def answered(self: Process, timeout_s: float) -> Any:
        command, began = asked.get(id(self), ("ready", time.monotonic()))  # sent before this began
        try:
            return answer(self, timeout_s)
        finally:
            seconds.setdefault(command, []).append(time.monotonic() - began)

    Process.send, Process.answer = sent, answered  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Process.send, Process.answer = send, answer  # type: ignore[method-assign]


def inside(spec: KernelSpec, text: str, device: torch.device) -> None:
    """Print where the seconds of trials go in the worker's own process, by distribution, function and kernel."""
    graph = capture_spec(spec, verify=False)
    program = Program.start(graph)
    program = program.with_implementation(program.regions[0].id, Implementation("torch", text, "entry"))
    references = References(spec, graph, device)
    worker = Worker(spec, device)

    def tried(distribution: str) -> float:
        began = time.perf_counter()
        draw = Draw(7, distribution, references.parameter_seed())
        answer = worker.trial(0, draw, references.mutated, references.output_bytes, copies=references.plan.copies)
        for file in answer.files:
            os.close(file)
        worker.release(tidy=references.plan.tidy)
        return round((time.perf_counter() - began) * 1e3, 2)

    with torch.no_grad(), TemporaryDirectory() as folder, chdir(folder):  # a worker writes texts where it is
        worker.load(source=program.source)
        names = [EXAMPLES, *references.distributions]
        for distribution in names:
            tried(distribution)
        print("milliseconds of a trial", {name: tried(name) for name in names})
        worker._check_seal = lambda: None  # type: ignore[method-assign]  # a profiler is what it looks for
        with cProfile.Profile() as profile:
            for name in names:
                tried(name)
        pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(SHOWN)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as seen:
            for name in names:
                tried(name)
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=order, row_limit=SHOWN))


def another_job(gib: float) -> subprocess.Popen[str]:
    """A process that holds memory of the GPU until it is killed."""
    make = f"x = torch.empty({int(gib * GIB)}, dtype=torch.uint8, device='cuda')"
    code = f"import time, torch; {make}; print(1, flush=True); time.sleep(3600)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def main(
    case: Annotated[str, typer.Argument(help=f"One of {', '.join(CASES)}.")],
    size: Annotated[int, typer.Option(help="Rows of a matrix, or of an image.")] = 4096,
    device: Annotated[str, typer.Option(help="PyTorch's name of the device.")] = "cuda",
    hold: Annotated[float, typer.Option(help="GiB of the device that another job holds meanwhile.")] = 0.0,
    repeat: Annotated[int, typer.Option(help="Verifications; the last one is shown.")] = 2,
    within: Annotated[bool, typer.Option("--inside", help="Show the worker's side instead.")] = False,
) -> None:
    """Verify one program and print what that took."""
    spec, text = CASES[case](size)
    cuda = device != "cpu"
    if within:
        inside(spec, text, torch.device(device, 0) if cuda else torch.device(device))
        return
    other = another_job(hold) if hold and cuda else None
    evaluator = GpuEvaluator(spec, capture_spec(spec, verify=False), torch_device=device)
    try:
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(repeat):
            with commands_timed() as commands:
                found, profile = judged(evaluator, text)
            print({k: round(v, 3) for k, v in found.seconds.items()})
    finally:
        evaluator.close()
        if other is not None:
            other.kill()
            other.wait()
    refs = evaluator.references
    size_bytes = refs.input_bytes + sum(refs.output_bytes)
    peak = torch.cuda.max_memory_allocated() / size_bytes if cuda else None
    facts = {"ok": found.ok, "error": found.error, "plan": str(refs.plan), "way": refs.plan.way, "peak": peak}
    print(json.dumps(facts, indent=1))
    for command, times in sorted(commands.items(), key=lambda pair: -sum(pair[1])):
        print(f"{command:18} {len(times):4} times {sum(times):7.3f} s, first {times[0]:.3f}, largest {max(times):.3f}")
    pstats.Stats(profile, stream=sys.stdout).sort_stats("cumtime").print_stats("qimeng|built-in", SHOWN)


if __name__ == "__main__":
    typer.run(main)
