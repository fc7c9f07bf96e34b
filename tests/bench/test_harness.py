import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import cloudpickle
import pytest

from qimeng.bench.harness import RunOptions, pending, run_suite
from qimeng.bench.pool import run_tasks
from qimeng.bench.row import Row, Settings, blank_row, read_rows
from qimeng.bench.suite import Problem, load_kernelbench

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def problems(tmp_path: Path) -> tuple[Problem, ...]:
    folder = tmp_path / "KernelBench" / "level1"
    folder.mkdir(parents=True)
    for number, behaviour in enumerate(["fine", "raise", "exit", "kill", "skip", "fine"], 1):
        (folder / f"{number}_{behaviour}.py").write_text(f"# {number}\n")
    return load_kernelbench(tmp_path, 1)


def work(problem: Problem) -> Row | None:
    if problem.name == "raise":
        raise ValueError("out of ideas")
    if problem.name == "exit":
        os._exit(3)
    if problem.name == "kill":
        os.kill(os.getpid(), 9)
    return None if problem.name == "skip" else blank_row(problem, Settings(), right=True)


def options(**changes: float) -> RunOptions:
    return RunOptions(Settings(seconds=1.0), overhead_seconds=60.0, jobs=2, **changes)  # type: ignore[arg-type]


def test_every_failure_is_a_row_and_costs_one_problem(problems: tuple[Problem, ...], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    started: list[str] = []
    rows = run_suite(problems, work, options(), out, on_start=lambda p: started.append(p.id))
    assert {r.number: r.error for r in rows} == {
        1: None,
        2: "ValueError: out of ideas",
        3: "the worker process died: exit code 3",
        4: "the worker process died: signal 9 (SIGKILL)",
        6: None,
    }
    assert read_rows(out) == rows
    assert len(started) == 6


def test_a_run_goes_on_where_it_ended(problems: tuple[Problem, ...], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    quick = [p for p in problems if p.name in ("fine", "raise")]
    settings = Settings(seconds=1.0)
    first = run_suite(quick[:2], lambda p: work_with(p, settings), options(), out)
    assert [r.number for r in first] and {r.number for r in first} == {1, 2}
    assert [p.number for p in pending(quick, options(), out)] == [6]
    assert [p.number for p in pending(quick, options(retry=True), out)] == [2, 6]
    assert len(pending(quick, RunOptions(Settings(seconds=1.0, mode="high")), out)) == 3
    quick[0].path.write_text("# changed\n")
    changed = load_kernelbench(tmp_path, 1, "1,2,6")
    assert [p.number for p in pending(changed, options(), out)] == [1, 6]


def work_with(problem: Problem, settings: Settings) -> Row:
    if problem.name == "raise":
        raise ValueError("out of ideas")
    return blank_row(problem, settings, right=True)


def test_nothing_starts_that_could_not_use_its_budget(problems: tuple[Problem, ...], tmp_path: Path) -> None:
    started: list[str] = []
    rows = run_suite(
        problems, work, options(total_seconds=0.5), tmp_path / "rows.jsonl", on_start=lambda p: started.append(p.id)
    )
    assert rows == () and started == []


def test_what_the_end_of_the_run_cuts_off_leaves_no_row() -> None:
    start = time.monotonic()
    outcomes = list(run_tasks(iter([100.0]), time.sleep, jobs=1, limit_s=60, stop_at=start + 1.0))
    assert [(o.interrupted, o.result) for o in outcomes] == [(True, None)]
    assert time.monotonic() - start < 10


def test_what_hangs_is_ended() -> None:
    outcomes = list(run_tasks(iter([100.0]), time.sleep, jobs=1, limit_s=1.0, stop_at=time.monotonic() + 60))
    assert [(o.failure, o.interrupted) for o in outcomes] == [("took longer than 1 s", False)]


def test_what_does_not_fit_beside_others_waits() -> None:
    started: list[tuple[float, int]] = []
    running: list[int] = []

    def may_start(size: int, beside: Sequence[int]) -> bool:
        running.append(size + sum(beside))
        return not beside or size + sum(beside) <= 10

    def on_start(size: int) -> None:
        started.append((time.monotonic(), size))

    sizes = [4, 9, 5, 20, 1]
    outcomes = list(
        run_tasks(sizes, lambda size: size, 3, 60, time.monotonic() + 60, may_start=may_start, on_start=on_start)
    )
    assert sorted(o.result for o in outcomes) == sorted(sizes)
    assert [size for _, size in started][:3] == [4, 5, 1]


def test_children_of_a_worker_die_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def with_child(name: str) -> None:
        import subprocess

        child = subprocess.Popen(["sleep", "100"])
        Path(name).write_text(str(child.pid))
        os.kill(os.getpid(), 9)

    list(run_tasks(iter([str(pid_file)]), with_child, jobs=1, limit_s=60, stop_at=time.monotonic() + 60))
    state = Path(f"/proc/{pid_file.read_text()}/stat")
    end = time.monotonic() + 10
    with contextlib.suppress(FileNotFoundError):
        while state.read_text().split()[2] != "Z":
            assert time.monotonic() < end, "the child still runs"
            time.sleep(0.05)
