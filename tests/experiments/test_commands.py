"""The commands in `benchmarks/`: each starts, says what it does, and hands on what it is given."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from benchmarks import cost, judge, kernelbench, planner, writer

ROOT = Path(__file__).resolve().parents[2]
RUN = CliRunner()
APPS = {
    "cost": cost.app,
    "judge": judge.app,
    "kernelbench": kernelbench.app,
    "planner": planner.app,
    "writer": writer.app,
}


@pytest.mark.parametrize("name", APPS)
def test_every_command_says_what_it_does(name: str) -> None:
    assert RUN.invoke(APPS[name], ["--help"]).exit_code == 0
    for command in APPS[name].registered_commands:
        assert command.callback is not None and command.callback.__doc__
        called = command.name or command.callback.__name__.replace("_", "-")
        found = RUN.invoke(APPS[name], [called, "--help"])
        assert found.exit_code == 0, found.output


def test_the_commands_that_documents_name_exist() -> None:
    documents = [d for where in ("docs", "benchmarks", "experiments") for d in (ROOT / where).glob("*.md")]
    lines = [line for d in documents for line in re.findall(r"python -m benchmarks\.(\w+ [^`|\n#]*)", d.read_text())]
    assert len(lines) > 10
    for line in lines:
        name, *words = line.split()
        known = get_command(APPS[name]).commands  # type: ignore[attr-defined]
        if not words or words[0] in ("--help", "`"):
            continue
        assert words[0] in known, line
        options = {option for parameter in known[words[0]].params for option in parameter.opts}
        assert {w for w in words if w.startswith("--")} <= options, line


def test_a_named_run_is_a_call_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(kernelbench.subprocess, "run", lambda command, check: called.append(command))
    assert RUN.invoke(kernelbench.app, ["run", "KB", str(tmp_path), "--only", "high,sweep"]).exit_code == 0
    assert [c[2:6] for c in called] == [["qimeng.cli", "bench", "kernelbench", "--root"]] * 2
    assert called[0][-4:] == ["--families", "gemm", "--mode", "high"]
    assert called[1][called[1].index("--out") + 1] == str(tmp_path / "sweep.jsonl")
    called.clear()
    assert RUN.invoke(kernelbench.app, ["run", "KB", str(tmp_path), "--seconds", "10"]).exit_code == 0 and not called
    assert "known: default" in str(RUN.invoke(kernelbench.app, ["run", "KB", "out", "--only", "none"]).exception)


def test_all_measurements_share_the_time_and_one_that_fails_stops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, float] = {}

    def fake(name: str) -> Any:
        def run(out: Path, seconds: float, **options: Any) -> None:
            given[name] = seconds + judge.END_S
            if name == "mutants":
                raise ValueError("broke")

        return run

    for name in judge.WEIGHTS:
        monkeypatch.setattr(judge, name, fake(name))
    found = RUN.invoke(judge.app, ["all", str(tmp_path / "rows"), "--seconds", "1300"])
    assert list(given) == list(judge.WEIGHTS) and "mutants: ValueError: broke" in found.output
    assert "failed: mutants" in str(found.exception)
    assert given["exploits"] == pytest.approx(200, rel=0.01)  # a run that ends at once leaves its time to the others
    assert given["stability"] == pytest.approx(1300, rel=0.01)
    given.clear()
    RUN.invoke(judge.app, ["all", str(tmp_path / "rows"), "--seconds", "100", "--only", "cost,soak"])
    assert list(given) == ["soak", "cost"]
