"""Many candidates in a row, some of which do harm: does any of it reach the others?

Deals in a sequence of candidates that is judged twice, with and without the harmful ones, and in what is left on the
machine. Knows nothing about files of rows or tables.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.trust.journal import Data, Journal
from experiments.trust.machine import look
from qimeng.envs.judge.gpu_evaluator import GpuEvaluator
from qimeng.envs.workers.shared_server import close_shared_servers
from qimeng.exploits import EXPLOITS, HONEST_CASES, Case, program_of, spec_of
from qimeng.exploits.cases import MARK
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import merge
from qimeng.interfaces import Gate
from qimeng.program.program import Program, torch_implementation
from qimeng.program.verify import capture_spec
from qimeng.spec import DISTRIBUTIONS

SHARE = 5
"""One in so many candidates does harm."""
SAMPLE = 20
"""So many candidates are judged between two looks at the machine."""
TRIALS = len(DISTRIBUTIONS) + 1
"""Trials of a program: on every distribution (as given, with changed parameters as well), so that its verdict is no
matter of which are drawn."""
TIMEOUT_S = 5.0
"""Seconds after which a call counts as hung."""

HARM: dict[str, str] = {
    "crash": "def entry(*a):\n    os.kill(os.getpid(), signal.SIGSEGV)\n",
    "abort at import": "os.abort()\n",
    "device assert": """
def entry(*a):
    return (a[0].reshape(-1)[torch.tensor([a[0].numel()], device=a[0].device)],)
""",
    "hang": "def entry(*a):\n    time.sleep(25)\n",
    "spin": "def entry(*a):\n    while True:\n        pass\n",
    "leak": """
kept = []
def entry(*a):
    if len(kept) < 8:
        kept.append(torch.ones((1 << 28) if a[0].is_cuda else (1 << 25), device=a[0].device))
    return right(*a)
""",
    "fork": f"""
def entry(*a):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.alarm(25)
            _mark()
            open({MARK!r} + str(os.getpid()), "wb").write(bytes(1 << 20))
            time.sleep(20)
        os._exit(0)
    return right(*a)
""",
    "many children": """
def entry(*a):
    for _ in range(12):
        if os.fork() == 0:
            signal.alarm(25)
            _mark()
            time.sleep(20)
            os._exit(0)
    return right(*a)
""",
    "threads": """
def entry(*a):
    for _ in range(8):
        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
    return right(*a)
""",
    "files": f"""
def entry(*a):
    for folder in (os.getcwd(), tempfile.gettempdir()):
        for i in range(8):
            with open(os.path.join(folder, f"{MARK}-{{i}}"), "wb") as out:
                out.write(bytes(1 << 20))
    return right(*a)
""",
}
"""What it does to what it runs; ``right`` is the computation itself, and every text begins with an exploit's bounds."""

JUDGE = f"{os.getpid()}-{int(time.time())}"
"""Tells what this process saw from what others did."""

PREAMBLE = "import os, signal, tempfile, threading, time\nimport torch\n"


@dataclass(frozen=True)
class Candidate:
    """One of the sequence.

    Attributes:
        number: in the sequence, from 0.
        case: what is judged.
        harm: what it does; empty for the others.
    """

    number: int
    case: Case
    harm: str = ""

    @property
    def name(self) -> str:
        """What people call it."""
        return self.harm or f"{self.case.kind}: {self.case.name}"


def sequence(count: int, seed: int, gpu: bool, specs: Sequence[str] = ()) -> list[Candidate]:
    """`count` candidates: honest ones, wrong ones, and one in `SHARE` that does harm.

    Args:
        count: how many.
        seed: of their order.
        gpu: whether those that need a GPU are among them.
        specs: only for these specifications; all by default.
    """
    rng = random.Random(seed)
    wrong = [c for c in EXPLOITS if c.kind == "wrong result"]
    others = [c for c in (*HONEST_CASES, *wrong) if (gpu or not c.needs_gpu) and (not specs or c.spec in specs)]
    keys = sorted({c.spec for c in others})
    stock: list[Case] = []
    found: list[Candidate] = []
    for start in range(0, count, SHARE):
        place = rng.randrange(SHARE)
        for number in range(start, min(start + SHARE, count)):
            stock = stock or rng.sample(others, len(others))
            if number - start == place:
                harm = list(HARM)[(number // SHARE) % len(HARM)]
                case = Case(harm, "harm", rng.choice(keys), HARM[harm], (), "it harms whoever runs it")
                found.append(Candidate(number, case, harm))
            else:
                found.append(Candidate(number, stock.pop()))
    return found


def share(candidates: Sequence[Candidate], part: int, parts: int) -> list[Candidate]:
    """What judge `part` of `parts` takes: as many as the others, of as few specifications as can be.

    An evaluator takes seconds to make; dealt out in turns, every judge would make one for each specification.
    """
    ordered = sorted(candidates, key=lambda c: c.case.spec)
    return ordered[len(ordered) * part // parts : len(ordered) * (part + 1) // parts]


class Bench:
    """Judges candidates, with a new evaluator where the specification changes; close it when done.

    One at a time: with those of all specifications open, eight judges had no room left on an H200.

    Args:
        gpu: whether on the GPU.
        sandbox: level of the workers' sandbox.
    """

    def __init__(self, gpu: bool, sandbox: str):
        self.gpu, self.sandbox = gpu, sandbox
        self._made: tuple[str, OpGraph, GpuEvaluator] | None = None

    def judge(self, candidate: Candidate) -> Data:
        """The fields of a candidate's row: gate, class of failure, times, seconds."""
        graph, evaluator = self._evaluator(candidate.case.spec)
        program = _program(candidate, graph, self.gpu)
        began = time.monotonic()
        found = evaluator.evaluate(program)
        return {
            "gate": found.gate.value,
            "failure": found.failure,
            "error": (found.error or "")[:300],
            "ms": found.ms if found.gate is Gate.PASSED else None,
            "spread": found.timing.spread if found.timing else None,
            "eager_ms": found.eager.device_ms if found.eager else None,
            "seconds": round(time.monotonic() - began, 3),
        }

    def close(self) -> None:
        """Close the evaluator."""
        if self._made is not None:
            self._made[2].close()
            self._made = None

    def _evaluator(self, key: str) -> tuple[OpGraph, GpuEvaluator]:
        if self._made is None or self._made[0] != key:
            self.close()
            spec = spec_of(key, self.gpu)
            device = "cuda" if self.gpu else "cpu"
            graph = capture_spec(spec, device=device)
            made = GpuEvaluator(
                spec, graph, torch_device=device, timeout_s=TIMEOUT_S, trials=TRIALS, sandbox=self.sandbox
            )
            self._made = key, graph, made
        return self._made[1:]


def run_pass(
    journal: Journal,
    candidates: Sequence[Candidate],
    harmful: bool,
    bench: Bench,
    folder: Path | str,
    keep_s: float = 0.0,
) -> Iterator[Data]:
    """Judge those of `candidates` that have no row yet, those of one specification one after the other.

    The machine is looked at now and then. Yields the rows as they come.

    Args:
        journal: where the rows go.
        candidates: the whole sequence.
        harmful: whether those that do harm are among them.
        bench: judges them; it is closed, and with it the fork server that all evaluators of this process share.
        folder: this process's folder for temporary files.
        keep_s: seconds of the journal's to leave to others.
    """
    name = "with" if harmful else "without"
    device = "cuda" if bench.gpu else "cpu"
    left = [c for c in candidates if (harmful or not c.harm) and not journal.has(f"{name}-{c.number}")]
    left.sort(key=lambda c: c.case.spec)

    def sample(when: str, number: int) -> Data:
        key = f"{name}-{when}-{number}-{JUDGE}"
        about = {"run": name, "when": when, "number": number, "device": device, "judge": JUDGE}
        return journal.add(key, what="sample", **about, **asdict(look(folder, bench.gpu)))

    if not left or journal.seconds_left <= keep_s:
        return
    try:
        for count, candidate in enumerate(left):
            if journal.seconds_left <= keep_s:
                break
            about: Data = {"what": "candidate", "run": name, "number": candidate.number, "device": device}
            about |= {"spec": candidate.case.spec, "name": candidate.name, "harm": candidate.harm}
            yield journal.add(f"{name}-{candidate.number}", **about, **bench.judge(candidate))
            if count % SAMPLE == SAMPLE - 1:
                yield sample("running", candidate.number)
        yield sample("before the end", left[-1].number)
    finally:
        bench.close()
        close_shared_servers()
    yield sample("closed", left[-1].number)


def _program(candidate: Candidate, graph: OpGraph, gpu: bool) -> Program:
    case = candidate.case
    if candidate.harm:
        whole = Program.start(graph)
        region = merge(whole.regions, [r.id for r in whole.regions])[0] if len(whole.regions) > 1 else whole.regions[0]
        plain = torch_implementation(region)
        text = f"{PREAMBLE}{plain.source}\nright = {plain.entry}\n{case.source}"
        case = Case(case.name, case.kind, case.spec, text, (), case.reason)
    return program_of(case, graph, gpu)


__all__ = ["HARM", "SAMPLE", "SHARE", "Bench", "Candidate", "run_pass", "sequence", "share"]
