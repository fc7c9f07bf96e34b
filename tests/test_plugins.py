"""Files that register objects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qimeng import plugins
from qimeng.actions import kinds, unregister
from qimeng.errors import QimengError

KIND = '''
from qimeng.actions import ScheduleKind, register


class Doubled(ScheduleKind):
    """Give each program twice the rows.

    args: the region.
    rewrite: ``block_p = 4`` -> ``block_p = 8``
    """

    name = "doubled"
    family = "tile"

    def rewrite(self, schedule, plan, device, param):
        return (schedule.but(block_p=2 * schedule.block_p),)


register(Doubled())
'''


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_run", set())
    monkeypatch.setenv(plugins.FILES, "")


def test_a_file_brings_a_kind_once_and_other_processes_run_it_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(KIND)
    try:
        plugins.use_files([path])
        plugins.use_files([path])
        assert "doubled" in kinds()
    finally:
        unregister("doubled")
    code = "from qimeng.actions import kinds; print('doubled' in kinds())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.py", "x = 1\ny = x / 0\n", r"bad.py, line 2 does not run: ZeroDivisionError"),
        ("bad.py", "def (", "bad.py does not run: SyntaxError"),
        ("bad.txt", "x = 1", "a plugin is a Python file"),
        ("bad.py", None, "No such file"),
    ],
)
def test_a_file_that_does_not_run_is_named(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(QimengError, match=message):
        plugins.use_files([tmp_path / name])
