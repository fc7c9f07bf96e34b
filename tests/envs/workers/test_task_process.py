"""A process that works for its parent: what it inherits, and what it asks meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from qimeng.envs.workers.task_process import Question, TaskProcess, ask_parent

SCRIPT = """
from qimeng.envs.workers.task_process import TaskProcess

print("the main module runs", flush=True)
process = TaskProcess({"COLOUR": "blue"})
process.send(lambda task: [task + 1, *(__import__("os").environ[k] for k in ("COLOUR", "OMP_WAIT_POLICY"))], 1)
print(process.receive())
process.dismiss(10)
assert __file__.endswith("script.py")
"""


def test_a_script_is_not_run_again_in_its_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)  # without ``if __name__ == "__main__"``, and its function goes along all the same
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_WAIT_POLICY": "ACTIVE"},
    )
    assert done.stdout.splitlines() == ["the main module runs", "([2, 'blue', 'ACTIVE'], None, True)"], done.stderr


def ask_twice(task: int) -> list[int]:
    return [ask_parent(task), ask_parent(task + 1)]


def test_what_work_asks_is_answered_by_the_parent() -> None:
    process = TaskProcess()
    try:
        process.send(ask_twice, 5)
        for number in (5, 6):
            assert process.receive() == (Question(number), None, True)
            process.reply(10 * number)
        assert process.receive() == ([50, 60], None, True)
    finally:
        process.kill()
