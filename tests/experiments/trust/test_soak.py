"""The soak's sequence, bookkeeping and eyes; a bench that judges nothing stands in for the judge."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.tables import render
from experiments.trust import machine
from experiments.trust.journal import Journal, read_journal
from experiments.trust.machine import look
from experiments.trust.soak import HARM, PREAMBLE, SAMPLE, SHARE, Bench, Candidate, run_pass, sequence, share
from experiments.trust.stability import TIMES_US, cases, lowered
from qimeng.bench.row import Environment
from qimeng.device import DEVICES
from qimeng.exploits.cases import own_mark
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec

HERE = Environment(device="a machine", commit="0123456789abcdef")


class Nobody(Bench):
    """Passes everything but what does harm; a verdict changes after harm where it is told so."""

    def __init__(self, moody: bool = False) -> None:
        super().__init__(gpu=False, sandbox="full")
        self.moody, self.harmed, self.closed = moody, False, False

    def judge(self, candidate: Candidate) -> dict[str, object]:
        failure = "crash" if candidate.harm else "wrong" if self.moody and self.harmed else None
        self.harmed = self.harmed or bool(candidate.harm)
        gate = "program" if failure else "passed"
        times = {"ms": None if failure else 1.0, "spread": 0.01, "eager_ms": 1.0, "seconds": 0.5}
        return {"gate": gate, "failure": failure, "error": "", **times}

    def close(self) -> None:
        self.closed = True


def test_one_in_five_does_harm_and_every_harm_is_done() -> None:
    found = sequence(200, seed=3, gpu=False)
    assert [c.number for c in found] == list(range(200)) and found == sequence(200, seed=3, gpu=False)
    blocks = [found[i : i + SHARE] for i in range(0, 200, SHARE)]
    assert all(sum(bool(c.harm) for c in block) == 1 for block in blocks)
    assert {c.harm for c in found if c.harm} == set(HARM)
    assert not any(c.case.needs_gpu for c in found)
    assert {c.case.spec for c in sequence(50, 0, False, ["softmax", "norm"])} == {"softmax", "norm"}
    for text in HARM.values():
        ast.parse(PREAMBLE + text)


def test_judges_share_the_candidates_evenly_with_few_specifications_each():
    candidates = sequence(100, seed=3, gpu=False)
    shares = [share(candidates, part, 4) for part in range(4)]
    assert [len(s) for s in shares] == [25] * 4
    assert sorted(c.number for s in shares for c in s) == list(range(100))
    specs = {c.case.spec for c in candidates}
    assert sum(len({c.case.spec for c in s}) for s in shares) <= len(specs) + 3


def test_a_run_goes_on_and_every_candidate_is_judged_once(tmp_path: Path) -> None:
    journal, candidates = Journal(tmp_path / "rows.jsonl", HERE), sequence(2 * SAMPLE, 0, False)
    rows = run_pass(journal, candidates, True, Nobody(), tmp_path)
    order = [c.number for c in sorted(candidates, key=lambda c: (c.case.spec, c.number))]
    assert [next(rows)["number"] for _ in range(7)] == order[:7]
    rows.close()
    again = Nobody()
    left = list(run_pass(Journal(tmp_path / "rows.jsonl", HERE), candidates, True, again, tmp_path))
    assert again.closed and [r["number"] for r in left if r["what"] == "candidate"] == order[7:]
    assert [r["when"] for r in left if r["what"] == "sample"] == ["running", "before the end", "closed"]
    assert not list(run_pass(Journal(tmp_path / "rows.jsonl", HERE), candidates, True, Nobody(), tmp_path))
    late = Journal(tmp_path / "rows.jsonl", HERE, seconds=100)
    assert not list(run_pass(late, candidates, False, Nobody(), tmp_path, keep_s=100))


@pytest.mark.parametrize("moody", [False, True])
def test_verdicts_that_harm_changes_are_told(tmp_path: Path, moody: bool) -> None:
    journal, candidates = Journal(tmp_path / "rows.jsonl", HERE), sequence(10, 0, False)
    for harmful in (False, True):
        list(run_pass(journal, candidates, harmful, Nobody(moody), tmp_path))
    text = render("<!-- bench:soak rows.jsonl -->\n<!-- /bench -->\n", tmp_path)
    assert "| others judged in both runs | 8 |" in text and "| candidates that do harm | 2 (" in text
    changed = next(line for line in text.splitlines() if line.startswith("| with another gate or verdict"))
    assert changed.startswith("| with another gate or verdict | 0 |") is not moody
    assert ("passed, then program (wrong)" in changed) is moody
    numbers = [r["number"] for r in read_journal(tmp_path / "rows.jsonl") if r["run"] == "without"]
    assert not {c.number for c in candidates if c.harm} & set(numbers[:8])


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    code = f"open('/proc/self/comm', 'w').write({own_mark()!r}); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_what_is_left_is_seen(tmp_path: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    living = machine._living  # other tests of this process may have left servers, and files with its mark
    mine = {os.getpid(), child.pid}
    monkeypatch.setattr(machine, "_living", lambda: {pid: about for pid, about in living().items() if pid in mine})
    seen = look(tmp_path, gpu=False)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_text("left")
    child.kill()
    child.wait()
    later = look(tmp_path, gpu=False)
    assert (seen.marked, seen.processes) == (1, 1) and (later.marked, later.processes) == (0, 0)
    assert later.files - seen.files == 1 and later.rss_mib > 10 and later.gpu_mib == 0


def test_kernels_to_be_timed_grow_with_the_time_wanted_and_are_ours() -> None:
    by_kernel: dict[str, list[int]] = {}
    for case in cases():
        rows = int(case.spec(4800.0, 100.0).name.split()[1].split("x")[0])
        by_kernel.setdefault(case.kernel, []).append(rows)
    assert all(len(set(rows)) == len(TIMES_US) and rows == sorted(rows) for rows in by_kernel.values())
    softmax = next(c for c in cases() if c.kernel == "softmax")
    program = lowered(Program.start(capture_spec(softmax.spec(8.0, 0.05))), DEVICES["h200"])
    assert all(program.implementation(r).generated for r in program.regions)
