import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from qimeng.bench.families import Classification
from qimeng.bench.harness import RunOptions, pending, run_suite
from qimeng.bench.kernelbench import load_levels
from qimeng.bench.pool import PATIENCE, Outcome, Place, Pool
from qimeng.bench.row import Row, Settings, blank_row, read_rows
from qimeng.bench.suite import Problem
from qimeng.bench.survey import Facts

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def problems(tmp_path: Path) -> tuple[Problem, ...]:
    folder = tmp_path / "KernelBench" / "level1"
    folder.mkdir(parents=True)
    for number, behaviour in enumerate(["fine", "raise", "exit", "kill", "fine"], 1):
        (folder / f"{number}_{behaviour}.py").write_text(f"# {number}\n")
    return load_levels(tmp_path)


def numbers(found: Iterable[Problem | Row]) -> list[int]:
    return sorted(int(one.id.removeprefix("level1/")) for one in found)


def work(problem: Problem) -> Row:
    if problem.name == "raise":
        raise ValueError("out of ideas")
    if problem.name == "exit":
        os._exit(3)
    if problem.name == "kill":
        os.kill(os.getpid(), 9)
    return blank_row(problem, Settings(), right=True)


def options(**changes: object) -> RunOptions:
    made = RunOptions(Settings(seconds=1.0), overhead_seconds=60.0, places=(Place(slots=2),))
    return replace(made, **changes)  # type: ignore[arg-type]


def test_every_failure_is_a_row_and_costs_one_problem(problems: tuple[Problem, ...], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    started: list[str] = []
    rows = run_suite(problems, work, options(), out, on_start=lambda p, place: started.append(p.id))
    assert {r.id: r.error for r in rows} == {
        "level1/1": None,
        "level1/2": "ValueError: out of ideas",
        "level1/3": "the worker process died: exit code 3",
        "level1/4": "the worker process died: signal 9 (SIGKILL)",
        "level1/5": None,
    }
    assert read_rows(out) == rows
    assert len(started) == 5


def test_a_run_goes_on_where_it_ended(problems: tuple[Problem, ...], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    quick = [p for p in problems if p.name in ("fine", "raise")]
    settings = Settings(seconds=1.0)
    first = run_suite(quick[:2], lambda p: work_with(p, settings), options(), out)
    assert numbers(first) == [1, 2]
    assert numbers(pending(quick, options(), out)) == [5]
    assert numbers(pending(quick, options(retry=True), out)) == [2, 5]
    assert len(pending(quick, RunOptions(Settings(seconds=1.0, mode="high")), out)) == 3
    (tmp_path / "KernelBench" / "level1" / "1_fine.py").write_text("# changed\n")
    changed = load_levels(tmp_path, "1", "1,2,5")
    assert numbers(pending(changed, options(), out)) == [1, 5]


def test_a_run_goes_on_from_rows_with_a_level_and_a_number(problems: tuple[Problem, ...], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    data = json.loads(blank_row(problems[0], Settings(seconds=1.0), right=True).to_json())
    assert (data.pop("id"), data.pop("suite"), data.pop("group")) == ("level1/1", "kernelbench", "level1")
    out.write_text(json.dumps({"level": 1, "number": 1, **data}) + "\n")
    assert numbers(pending(problems, options(), out)) == [2, 3, 4, 5]


def work_with(problem: Problem, settings: Settings) -> Row:
    if problem.name == "raise":
        raise ValueError("out of ideas")
    return blank_row(problem, settings, right=True)


def test_nothing_starts_that_could_not_use_its_budget(problems: tuple[Problem, ...], tmp_path: Path) -> None:
    started: list[str] = []
    rows = run_suite(
        problems,
        work,
        options(total_seconds=0.5),
        tmp_path / "rows.jsonl",
        on_start=lambda p, place: started.append(p.id),
    )
    assert rows == () and started == []


def run(tasks: Sequence[Any], work: Callable[[Any], Any], slots: int = 1, **limits: Any) -> list[Outcome[Any, Any]]:
    with Pool((Place(slots=slots),)) as pool:
        return list(pool.run(tasks, work, limits.pop("limit_s", 60.0), **limits))


def test_what_the_end_of_the_run_cuts_off_leaves_no_row() -> None:
    start = time.monotonic()
    outcomes = run([100.0], time.sleep, stop_at=start + 1.0)
    assert [(o.interrupted, o.result) for o in outcomes] == [(True, None)]
    assert time.monotonic() - start < 10


def test_what_hangs_is_ended() -> None:
    outcomes = run([100.0], time.sleep, limit_s=1.0)
    assert [(o.failure, o.interrupted) for o in outcomes] == [("took longer than 1 s", False)]


def test_what_does_not_fit_beside_others_waits() -> None:
    started: list[int] = []
    sizes = [4, 9, 5, 20, 1]
    outcomes = run(
        sizes,
        lambda size: size,
        slots=3,
        may_start=lambda size, beside: not beside or size + sum(beside) <= 10,
        on_start=lambda size, place: started.append(size),
    )
    assert sorted(o.result for o in outcomes) == sorted(sizes)
    assert started[:3] == [4, 5, 1]


def seen(name: str) -> tuple[str, int, bool]:
    return os.environ["PLACE"], os.getpid(), "PLACE" in os.environ


def test_each_place_has_workers_of_its_own_environment_which_stay() -> None:
    places = tuple(Place(f"gpu {n}", 2, {"PLACE": str(n)}) for n in range(2))
    at: dict[str, str] = {}
    with Pool(places) as pool:
        first = list(pool.run(list("abcd"), seen, 60.0, on_start=lambda t, p: at.update({t: p.environment["PLACE"]})))
        second = list(pool.run(list("abcd"), seen, 60.0))
    assert "PLACE" not in os.environ
    assert {o.task: o.result[0] for o in first if o.result} == at
    assert sorted(at.values()) == ["0", "0", "1", "1"]
    processes = [{o.result[1] for o in outcomes if o.result} for outcomes in (first, second)]
    assert processes[0] == processes[1] and len(processes[0]) == 4


def test_a_large_task_waits_for_an_empty_place_while_small_ones_go_on_elsewhere() -> None:
    order: list[tuple[int, str]] = []
    tasks = [10, 10, 10] + [n % 3 + 1 for n in range(3 * PATIENCE)]
    places = (Place("a", 2), Place("b", 2))
    with Pool(places) as pool:
        outcomes = list(
            pool.run(
                tasks,
                lambda size: time.sleep(0.02 * size),
                60.0,
                may_start=lambda size, beside: not beside or size + sum(beside) <= 11,
                on_start=lambda size, place: order.append((size, place.name)),
            )
        )
    assert len(outcomes) == len(tasks)
    assert order[:2] == [(10, "a"), (10, "b")]
    third = max(i for i, (size, _) in enumerate(order) if size == 10)
    assert 2 <= third < len(order) - 1


def test_what_takes_most_memory_starts_first_and_other_families_are_left_out(
    problems: tuple[Problem, ...], tmp_path: Path
) -> None:
    started: list[int] = []

    def look(problem: Problem) -> Facts:
        if problem.name == "kill":
            os.kill(os.getpid(), 9)
        family = "gemm" if problem.name == "exit" else "pointwise"
        return Facts(Classification(family), numbers([problem])[0] << 20)

    chosen = options(memory_bytes=1 << 30, families=("pointwise",), places=(Place(slots=1),))
    rows = run_suite(
        problems, work, chosen, tmp_path / "rows.jsonl", look, on_start=lambda p, place: started.extend(numbers([p]))
    )
    assert started == [5, 2, 1]
    assert numbers(rows) == [1, 2, 5]


def test_children_of_a_worker_die_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def with_child(name: str) -> None:
        import subprocess

        child = subprocess.Popen(["sleep", "100"])
        Path(name).write_text(str(child.pid))
        os.kill(os.getpid(), 9)

    run([str(pid_file)], with_child)
    state = Path(f"/proc/{pid_file.read_text()}/stat")
    end = time.monotonic() + 60
    with contextlib.suppress(FileNotFoundError):
        while state.read_text().split()[2] != "Z":
            assert time.monotonic() < end, "the child still runs"
            time.sleep(0.05)


def test_workers_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"""
import os, pathlib, time
from qimeng.bench.pool import Pool

def work(task):
    pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))
    time.sleep(100)

if __name__ == "__main__":
    list(Pool().run([1], work, 60.0))
"""
    (tmp_path / "run.py").write_text(script)
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen([sys.executable, tmp_path / "run.py"], env={**os.environ, "PYTHONPATH": root})
    end = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < end and process.poll() is None, "no worker has begun"
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    state = Path(f"/proc/{pid_file.read_text()}/stat")
    with contextlib.suppress(FileNotFoundError):
        while state.read_text().split()[2] != "Z":
            assert time.monotonic() < end, "the worker still runs"
            time.sleep(0.02)
