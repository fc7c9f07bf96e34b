"""An oracle that knows nothing of the judge: is a program wrong on any of many inputs?

Deals in a problem's own text, run as it stands in float64, in PyTorch's own dtype, and as the program. It shares no
code with the judge: inputs, weights, errors and limits are its own, and a test holds that it imports none of it. What
Triton's interpreter gets wrong is mended by `qimeng.envs.estimate.interpreter`, where programs run in it: that is the
machine.

A program is *wrong* where its error is over 10 times eager's on any of the inputs. The error of an output is
the largest of |y - r| / (|r| + mean of |r| over its last dimension); eager's counts as half an ulp where it is smaller.
The inputs: half as the problem makes them, half with each tensor times a factor between 0.01 and 5; the weights: as the
problem makes them for every other input, else moved by a tenth. Elements that are not finite in float64 or in eager are
left out. Integers and booleans must be eager's or the float64 run's.

It runs as a process of its own (`serve`), which opens no device and forks one child for each program, so that crashes,
hangs and written-over memory stay there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

FACTOR = 10.0
"""Times eager's error above which a program counts as wrong."""
STOCK_TRIALS, STOCK_SEED = 5, 42
"""KernelBench's own check: five draws as the problem makes them (`src/kernelbench/eval.py`, commit 423217d)."""
STOCK_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
LOOSE_TOLERANCE = 1e-2
"""What KernelBench allowed every dtype before."""


@dataclass(frozen=True)
class Question:
    """The problem that programs are held against.

    Attributes:
        text: a KernelBench-style file.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``; inputs and weights are cast to it.
        mode: ``"default"``, ``"highest"`` or ``"high"`` (TF32 products).
        device: ``"cpu"`` or ``"cuda"``.
        inputs: how many.
    """

    text: str
    dtype: str = "float32"
    mode: str = "default"
    device: str = "cpu"
    inputs: int = 200


@dataclass(frozen=True)
class Finding:
    """What was seen of one program.

    Attributes:
        found: ``"wrong"``, ``"right"`` (nothing was seen), ``"refused"`` (it raised, or does not compile), ``"crash"``
            or ``"hang"``.
        error: the largest error seen; None where it is no number, or where none was measured.
        times: that over eager's on the same input.
        inputs: how many inputs were tried.
        words: the exception, or where it is wrong.
        stock: whether KernelBench's own check passes; None where it was not reached.
        loose: the same at the tolerance of 1e-2 that it had before.
        seconds: wall seconds.
    """

    found: str
    error: float | None = None
    times: float | None = None
    inputs: int = 0
    words: str = ""
    stock: bool | None = None
    loose: bool | None = None
    seconds: float = 0.0


class Problem:
    """A problem's inputs, weights and results, made from its text.

    Args:
        question: the problem.
    """

    def __init__(self, question: Question):
        self.question, self.dtype = question, getattr(torch, question.dtype)
        self.file = types.ModuleType("problem")
        self._seeded(0, lambda: exec(compile(question.text, "<problem>", "exec"), vars(self.file)))

    def model(self, dtype: torch.dtype, moved: bool) -> torch.nn.Module:
        """The reference; with weights moved by a tenth of normal noise where `moved`."""
        make: Callable[[], torch.nn.Module] = lambda: self.file.Model(*self.file.get_init_inputs())  # noqa: E731
        model: torch.nn.Module = self._seeded(STOCK_SEED, make).to(self.dtype)
        if moved:
            generator = torch.Generator().manual_seed(7)
            with torch.no_grad():
                for weight in model.parameters():
                    noise = torch.randn(weight.shape, generator=generator)
                    weight.mul_(1 + 0.1 * noise.to(weight.dtype)).add_(0.1 * noise.flip(0).to(weight.dtype))
        return model.to(dtype)

    def inputs(self, number: int) -> list[Any]:
        """Inputs number `number`, in the problem's dtype, on the CPU."""
        drawn = self._seeded(1000 + number, self.file.get_inputs)
        drawn = [x.to(self.dtype) if _floats(x) else x for x in drawn]
        if number % 4 < 2:
            return drawn
        factors = torch.empty(len(drawn)).uniform_(math.log(0.01), math.log(5), generator=_generator(number)).exp()
        return [x * float(f) if _floats(x) else x for x, f in zip(drawn, factors, strict=True)]

    def stock_inputs(self, number: int) -> list[Any]:
        """Inputs as KernelBench draws them for its trial `number`."""
        seeds = torch.randint(0, 2**32 - 1, (STOCK_TRIALS,), generator=_generator(STOCK_SEED)).tolist()
        drawn = self._seeded(seeds[number], self.file.get_inputs)
        return [x.to(self.dtype) if _floats(x) else x for x in drawn]

    def exact(self, number: int, models: tuple[torch.nn.Module, torch.nn.Module]) -> list[torch.Tensor]:
        """The float64 results for inputs `number`, by the model that belongs to them."""
        inputs = [x.double() if _floats(x) else x for x in self.inputs(number)]
        with torch.no_grad():
            return tensors(models[number % 2](*inputs))

    @staticmethod
    def _seeded(seed: int, make: Callable[[], Any]) -> Any:
        torch.manual_seed(seed)
        return make()


class Oracle:
    """Holds programs against one problem, each in a child of this process.

    Args:
        question: the problem.
    """

    def __init__(self, question: Question):
        torch.set_num_threads(1)  # of a process with more, a fork hangs
        self.question, self.problem = question, Problem(question)
        doubles = (self.problem.model(torch.float64, False), self.problem.model(torch.float64, True))
        self.exact = [self.problem.exact(i, doubles) for i in range(question.inputs)]

    def ask(self, source: str, limit_s: float) -> Finding:
        """What is seen of the program `source`, a file with a class `Model`, within `limit_s` seconds."""
        began, folder = time.monotonic(), tempfile.mkdtemp(prefix="oracle_")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            self._child(source, folder, writer, limit_s)
        os.close(writer)
        text, status = _read_until(reader, child, began + limit_s + 20)
        shutil.rmtree(folder, ignore_errors=True)
        seconds = round(time.monotonic() - began, 2)
        if text.endswith("\n"):
            return Finding(**{**json.loads(text), "seconds": seconds})
        if status is None:
            return Finding("hang", seconds=seconds, words=f"no answer in {limit_s + 20:g} s")
        return Finding("crash", seconds=seconds, words=f"ended with status {status}")

    def _child(self, source: str, folder: str, writer: int, limit_s: float) -> None:
        """Answer into `writer` and end; never returns."""
        try:
            os.setpgid(0, 0)
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            os.environ["TRITON_CACHE_DIR"] = folder
            try:
                seen = self._look(_load(source, folder), time.monotonic() + limit_s)
            except Exception as error:  # noqa: BLE001  whatever a program raises is its answer
                seen = Finding("refused", words=f"{type(error).__name__}: {error}"[-600:])
            os.write(writer, (json.dumps(asdict(seen)) + "\n").encode())
        finally:
            os._exit(0)

    def _look(self, program: Any, end: float) -> Finding:
        device, mode = self.question.device, self.question.mode
        torch.backends.cuda.matmul.allow_tf32 = mode == "high"
        if mode == "highest":
            torch.backends.cudnn.allow_tf32 = False
        eager = tuple(self.problem.model(self.problem.dtype, moved).to(device) for moved in (False, True))
        with torch.no_grad():
            mine = tuple(_with_state(program, model, device) for model in eager)
            stock = loose = True
            for number in range(STOCK_TRIALS):
                inputs = self.problem.stock_inputs(number)
                y, e = _call(mine[0], inputs, device), _call(eager[0], inputs, device)
                stock = stock and _close(y, e, None)
                loose = loose and _close(y, e, LOOSE_TOLERANCE)
            seen = Finding("right")
            for number, exact in enumerate(self.exact):
                if time.monotonic() > end:
                    break
                inputs = self.problem.inputs(number)
                y, e = _call(mine[number % 2], inputs, device), _call(eager[number % 2], inputs, device)
                seen = _worse(seen, compare(y, e, exact), number)
                if seen.found == "wrong":
                    break
        return Finding(**{**asdict(seen), "stock": stock, "loose": loose})


def compare(program: list[torch.Tensor], eager: list[torch.Tensor], exact: list[torch.Tensor]) -> Finding:
    """The outputs of one call beside eager's and the float64 run's, all on the CPU."""
    if len(program) != len(eager):
        return Finding("wrong", words=f"{len(program)} outputs instead of {len(eager)}")
    worst = Finding("right")
    for place, (y, e, r) in enumerate(zip(program, eager, exact, strict=True)):
        if y.shape != e.shape or y.dtype != e.dtype:
            return Finding("wrong", words=f"output {place} is {tuple(y.shape)} {y.dtype}")
        if not y.is_floating_point():
            right = (y == e) | (y == r.to(y.dtype))
            if not bool(right.all()):
                return Finding("wrong", words=f"output {place}: {int((~right).sum())} elements differ")
            continue
        own, error = _error(e, r, e), _error(y, r, e)
        times = error / max(own, torch.finfo(y.dtype).eps / 2)
        if not times <= (worst.times or 0.0):
            told = error if math.isfinite(error) else None
            found = "right" if times <= FACTOR else "wrong"
            worst = Finding(found, told, times if math.isfinite(times) else None, words=f"output {place}")
            if told is None:
                return worst
    return worst


def tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        return [t for x in output.values() for t in tensors(x)]
    return [t for x in output for t in tensors(x)] if isinstance(output, list | tuple) else []


def _error(y: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor) -> float:
    """The largest error of `y`; infinite where it is not finite and should be."""
    y, r = y.double(), exact.double()
    known = r.isfinite() & eager.isfinite()
    clean = torch.where(known, r, 0.0).abs()
    scale = clean + (clean.mean(-1, keepdim=True) if r.dim() else clean)
    errors = torch.where(known, (y - r).abs() / scale.clamp(min=torch.finfo(eager.dtype).tiny), 0.0)
    return float(errors.nan_to_num(math.inf, math.inf).max()) if errors.numel() else 0.0


def _worse(a: Finding, b: Finding, number: int) -> Finding:
    worse = b if b.found == "wrong" or (b.times or 0.0) > (a.times or 0.0) else a
    words = f"{b.words}, input {number}" if worse is b else a.words
    return Finding(worse.found, worse.error, worse.times, number + 1, words)


def _call(model: torch.nn.Module, inputs: list[Any], device: str) -> list[torch.Tensor]:
    """The outputs of a call on copies of `inputs`, in memory that held no earlier result."""
    given = [x.to(device).clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    spoiled = [torch.full((1 << k,), math.nan, device=device) for k in range(4, 18)]
    del spoiled
    return [x.detach().cpu().clone() for x in tensors(model(*given))]


def _close(y: list[torch.Tensor], e: list[torch.Tensor], tolerance: float | None) -> bool:
    def one(a: torch.Tensor, b: torch.Tensor) -> bool:
        t = tolerance or STOCK_TOLERANCE.get(b.dtype, 1e-4)
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, atol=t, rtol=t)

    return len(y) == len(e) and all(one(a, b) for a, b in zip(y, e, strict=True))


def _load(source: str, folder: str) -> Any:
    """The program as a module with a file, which Triton reads."""
    import importlib.util

    path = Path(folder) / "candidate.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("candidate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["candidate"] = module
    spec.loader.exec_module(module)
    return module


def _with_state(program: Any, model: torch.nn.Module, device: str) -> torch.nn.Module:
    with torch.device(device):
        made: torch.nn.Module = program.Model()
    state = model.state_dict()
    made.load_state_dict({key: state[key] for key in made.state_dict()})
    return made.to(device)


def _floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _read_until(reader: int, child: int, end: float) -> tuple[str, int | None]:
    """What the child wrote, and its status; None where it did not end in time. Its process group is ended."""
    import select

    text = b""
    status: int | None = None
    while status is None and time.monotonic() < end:
        if select.select([reader], [], [], 0.05)[0] and (part := os.read(reader, 1 << 16)):
            text += part
            continue
        ended, code = os.waitpid(child, os.WNOHANG)
        status = code if ended else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    os.close(reader)
    return text.decode(errors="replace"), status


def serve() -> None:
    """Answer questions on standard input, a line of JSON each: the problem first, then programs.

    `experiments.trust.oracle_process` asks. On the CPU it is started with ``TRITON_INTERPRET=1``.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = Question(**json.loads(sys.stdin.readline()))
    if question.device == "cpu":
        from qimeng.envs.estimate.interpreter import mend

        mend()
    oracle = Oracle(question)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(asdict(oracle.ask(asked["source"], asked["limit_s"]))), file=out, flush=True)


if __name__ == "__main__":
    serve()

__all__ = ["FACTOR", "Oracle", "Problem", "Question", "Finding", "compare", "serve", "tensors"]
