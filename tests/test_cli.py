import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import qimeng
from qimeng.__main__ import main as begin
from qimeng.bench.row import append_row
from qimeng.cli import main
from qimeng.coder.llm.account import Account
from qimeng.coder.llm.coder import ModelMemory
from qimeng.coder.llm.replies import RecordedChat
from qimeng.envs.sandbox import LAYERS
from qimeng.envs.steps.result import Result
from tests.bench.rows import row
from tests.coder.llm.scripted import ScriptedChat


def run(*arguments: str | Path) -> int:
    """The exit code of `qimeng ARGUMENTS`."""
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return int(ended.value.code or 0)


QUICK = ("--coder", "fake", "--planner", "heuristic", "--search", "greedy")

PROBLEM = """
import torch
class Model(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        return torch.relu(x * self.scale) + 1
def get_inputs():
    return [torch.rand(16, 32)]
def get_init_inputs():
    return [2.0]
"""


@pytest.fixture
def problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to optimize, with the judge replaced by the fake, which needs no compiler."""
    from qimeng.envs.steps import setup
    from qimeng.testing import FakeEvaluator

    monkeypatch.setitem(setup.CODERS, "fake", "qimeng.testing:FakeCoder")
    monkeypatch.setattr(
        setup, "make_evaluator", lambda spec, start, context, **unused: FakeEvaluator(context.device, estimated=True)
    )
    path = tmp_path / "problem.py"
    path.write_text(PROBLEM)
    return path


def test_optimize_and_show(problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run("optimize", problem, *QUICK, "--device", "h200", "--seconds", 20, "--out", out) == 0
    text = capsys.readouterr().out
    assert "ms estimated" in text and "s left" in text
    assert "lowering" in text and "x PyTorch eager" in text
    assert {p.name for p in out.iterdir()} >= {"program.py", "recipe.json", "result.json", "report.md", "store.sqlite"}
    assert run("show", out, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["estimated"] is True and shown["speedup"] > 1 and shown["steps"]
    assert run("show", out) == 0
    assert "(estimated)" in capsys.readouterr().out
    assert run("show", out, "--source") == 0
    assert "class Model" in capsys.readouterr().out


LINEAR = """
import torch
def Model():
    return torch.nn.Linear(32, 16)
def get_inputs():
    return [torch.rand(8, 32)]
def get_init_inputs():
    return []
"""


def test_weights_are_declared_and_the_result_is_made_again(
    problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem.write_text(LINEAR)
    out, declared = tmp_path / "out", ("--weights", "int8", "--activations", "int8")
    assert run("optimize", problem, *QUICK, *declared, "--device", "h200", "--out", out) == 0
    assert "weights int8, activations int8 as declared" in capsys.readouterr().out
    assert run("replay", out, problem, *declared) == 0
    assert "program: the same\n" in capsys.readouterr().out
    assert run("replay", out, problem) == 2
    assert "is for weights int8, activations int8, and the given computation declares nothing" in " ".join(
        capsys.readouterr().err.split()
    )
    assert run("optimize", problem, *QUICK, "--weights", "int3", "--out", out) == 2
    assert "weights='int3': no such form of weights; known: " in capsys.readouterr().err


def test_optimize_for_machines_prints_one_object(
    problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("optimize", problem, "--coder", "fake", "--json", "--out", tmp_path / "out", "--evaluations", 3) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["folder"] == str(tmp_path / "out") and found["evaluations"] <= 3
    assert "s left" in captured.err


def test_an_interrupted_run_keeps_the_best(
    problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qimeng.testing import FakeEvaluator

    judged: list[int] = []
    answer = FakeEvaluator.answer

    def interrupted(self: FakeEvaluator, *arguments: object) -> object:
        judged.append(1)
        if len(judged) == 3:
            raise KeyboardInterrupt
        return answer(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeEvaluator, "answer", interrupted)
    assert run("optimize", problem, *QUICK, "--json", "--out", tmp_path / "out") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stopped"] == "interrupted"
    assert found["speedup"] > 1


def test_a_run_whose_model_never_answered_is_an_error(
    problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    account = Account(failures=Counter(connection=3))
    memory = ModelMemory(RecordedChat(ScriptedChat(), account), account)
    monkeypatch.setattr("qimeng.testing.FakeCoder.memory", memory)
    assert run("optimize", problem, *QUICK, "--evaluations", 1, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "never answered (connection): check its server" in error and error.endswith("[model]\n")
    assert (tmp_path / "out" / "result.json").exists()
    account.calls = 1
    memory.check_answered()


def test_numbers_and_files_that_say_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "rows.jsonl"
    empty.touch()
    assert run("bench", "summary", empty) == 2
    assert f"{empty} holds no rows" in capsys.readouterr().err
    assert run("collect", "--specs", -3, "--out", tmp_path / "out") == 2
    assert "greater than or equal to 1" in capsys.readouterr().err
    assert run("collect", "--only", "one", "--out", tmp_path / "out") == 2
    assert "--only picks among the specs of a suite: give --suite too" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("optimize",), ("collect",), ("train",), ("adapt", "lm")], ids="-".join)
def test_a_file_is_no_folder_to_write_to(
    command: tuple[str, ...], problem: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [problem] if command[0] in ("optimize", "adapt") else []
    assert run(*command, *given, "--out", problem) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_line(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("optimize", problem, *QUICK, "--out", problem / "below") == 2
    error = capsys.readouterr().err
    assert error.startswith("qimeng: ") and "below" in error and error.count("\n") == 1


def test_an_interruption_before_there_is_a_result(
    problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qimeng.envs.steps import setup

    def interrupted(*arguments: object, **unused: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "make_evaluator", interrupted)
    assert run("optimize", problem, *QUICK, "--out", tmp_path / "out") == 130
    said = capsys.readouterr()
    assert said.out == "no result yet: nothing is written\n" and said.err.strip() == "qimeng: interrupted"


def test_an_interruption_before_anything_faster_verifies_nothing(
    problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qimeng.testing import FakeEvaluator

    judged: list[int] = []

    def interrupted(self: FakeEvaluator, *arguments: object) -> object:
        judged.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeEvaluator, "answer", interrupted)
    assert run("optimize", problem, *QUICK, "--json", "--out", tmp_path / "out") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(judged) == 1 and found["on_pytorch"] and found["checked"]
    assert "interrupted before a faster program was found" in found["notes"]


def test_an_interrupted_benchmark_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qimeng.bench import harness

    folder, rows = tmp_path / "level1", tmp_path / "rows.jsonl"
    folder.mkdir()
    (folder / "1_mine.py").write_text(PROBLEM)
    (folder / "2_other.py").write_text(PROBLEM)

    def interrupted(*arguments: object, **named: object) -> object:
        append_row(rows, row(1, 1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(harness, "run_suite", interrupted)
    assert run("bench", "kernelbench", "--root", tmp_path, "--device", "h200", "--out", rows) == 130
    captured = capsys.readouterr()
    assert "2 problems, 0 of them already stored" in captured.out
    assert "2 problems left; run the same command again to go on from" in captured.out
    assert captured.err.strip() == "qimeng: interrupted"


def test_a_folder_of_problems_is_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qimeng.bench import harness

    seen: list[Any] = []
    monkeypatch.setattr(harness, "run_suite", lambda suite, work, *others, **named: seen.append((suite, work)) or ())
    (tmp_path / "mine").mkdir()
    for name in ("one", "two"):
        (tmp_path / "mine" / f"{name}.py").write_text(PROBLEM)
    rows = ("--device", "h200", "--out", tmp_path / "rows.jsonl")
    assert run("bench", "run", f"folder:{tmp_path / 'mine'}", "--only", "t*", *rows) == 0
    assert run("bench", "run", f"folder:{tmp_path / 'mine'}", "--dtype", "float16", *rows) == 0
    (some, own), (all_of_it, half) = seen
    assert [p.id for p in some] == ["two"] and [p.id for p in all_of_it] == ["one", "two"]
    assert (own.keywords["settings"].dtype, own.keywords["settings"].mode) == ("own", "own")
    assert half.keywords["settings"].dtype == "float16"
    assert own.keywords["limit_s"] == 35.0 + 60.0 + 120.0, "what the harness gives a problem"


def test_a_benchmark_of_a_model_keeps_its_answers_beside_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qimeng.bench import harness

    works: list[Any] = []
    monkeypatch.setattr(harness, "run_suite", lambda suite, work, *others, **named: works.append(work) or ())
    (tmp_path / "level1").mkdir()
    (tmp_path / "level1" / "1_mine.py").write_text(PROBLEM)
    command = ("bench", "kernelbench", "--root", tmp_path, "--device", "h200", "--out", tmp_path / "rows.jsonl")
    model = ("--coder", "openai:m", "--base-url", "http://127.0.0.1:1/v1", "--llm-calls", 3, "--candidates", 2)
    assert run(*command) == 0 and run(*command, *model) == 0
    plain, asked = (work.keywords for work in works)
    assert plain["settings"].coder == "template" and plain["answers"] is None
    assert asked["settings"].coder == "openai:m, 2 candidates" and asked["answers"] == tmp_path / "rows.sqlite"
    assert asked["coder"].account.allowance.calls == 3


@pytest.mark.parametrize("option", ["--seconds", "--evaluations"])
def test_budgets_are_not_negative(problem: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("optimize", problem, option, -1) == 2
    assert option in capsys.readouterr().err


def test_what_is_no_finished_result_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", tmp_path / "none") == 2
    assert capsys.readouterr().err == f"qimeng: there is no folder {tmp_path / 'none'} [error]\n"
    (tmp_path / "store.sqlite").write_bytes(b"")
    assert run("show", tmp_path) == 2
    assert "it is unfinished; run the same command again" in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_kept_elsewhere(
    problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Result.save

    def full(self: Result, folder: Path) -> Path:
        if Path(folder) == tmp_path / "out":
            raise OSError(28, "No space left on device")
        return save(self, folder)

    monkeypatch.setattr(Result, "save", full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("optimize", problem, *QUICK, "--json", "--evaluations", 2, "--out", tmp_path / "out") == 0
    captured = capsys.readouterr()
    folder = Path(json.loads(captured.out)["folder"])
    assert "No space left on device" in captured.err and str(folder) in captured.err
    assert folder.parent == tmp_path and (folder / "program.py").exists()


def test_a_module_that_does_nothing_is_returned(tmp_path: Path, problem: Path) -> None:
    path = tmp_path / "identity.py"
    path.write_text(PROBLEM.replace("return torch.relu(x * self.scale) + 1", "return x"))
    assert run("optimize", path, *QUICK, "--seconds", 10, "--out", tmp_path / "out") == 0


def test_an_interruption_while_the_command_line_starts_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(arguments: list[str] | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qimeng.cli.app", interrupted)
    assert run("devices") == 130
    assert capsys.readouterr().err == "qimeng: interrupted\n"

    def broken(arguments: list[str] | None) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise AttributeError("module has no attribute") from None

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        monkeypatch.setattr("qimeng.cli.app", broken)
        assert run("devices") == 130
        assert capsys.readouterr().err == "qimeng: interrupted\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "nothing was trained yet"),
        (("imitation.pt",), "keeps what was imitated, up to the last pass"),
        (("imitated/figures.json",), "keeps what was imitated; PPO had ended no rollout"),
        (("imitated/figures.json", "checkpoint.pt"), "keeps what was trained, up to the last rollout of PPO"),
    ],
)
def test_an_interrupted_training_says_what_is_kept(
    files: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from qimeng.planner.lm import sources

    def interrupted(*arguments: object, **named: object) -> object:
        for file in files:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(sources, "gather", interrupted)
    assert run("train", "--set", "answers='live'", "--out", tmp_path) == 130
    error = capsys.readouterr().err
    assert f"{said}; run the same command again to go on" in error and error.endswith("qimeng: interrupted\n")


def test_the_version_and_plugins_come_before_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"qimeng {qimeng.__version__}\n"
    assert run("--plugin", tmp_path / "none.py", "actions") == 2
    assert "none.py does not run: FileNotFoundError" in capsys.readouterr().err


def test_help_names_every_planner_and_search(capsys: pytest.CaptureFixture[str]) -> None:
    from qimeng.planner import PLANNERS, SEARCHES

    for command in (("optimize",), ("bench", "kernelbench")):
        assert run(*command, "--help") == 0
        text = "".join(capsys.readouterr().out.split())  # lines are broken within names that have hyphens
        assert not [name for name in (*PLANNERS, *SEARCHES) if name not in text]


def test_actions_lists_every_kind_with_its_rewrite(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("actions", "--json") == 0
    entries = {e["kind"]: e for e in json.loads(capsys.readouterr().out)}
    assert {"stop", "lowering", "fusion", "unfuse", "library", "tiling", "precision"} <= set(entries)
    for entry in entries.values():
        assert entry["summary"].endswith(".") and "->" in entry["rewrite"], entry
    assert run("actions") == 0
    assert "reordering" in capsys.readouterr().out


def test_devices_are_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("devices", "--json") == 0
    rows = {r["name"]: r for r in json.loads(capsys.readouterr().out)}
    assert rows["h200"]["sms"] == 132
    assert run("devices") == 0
    assert "mi300x" in capsys.readouterr().out


@pytest.mark.slow
def test_doctor_finds_this_machine_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json") == 0
    found = {c["name"]: c for c in json.loads(capsys.readouterr().out)}
    assert found["Triton's cache"]["works"] is True
    assert any(name.startswith("compile for sm_80") and c["works"] for name, c in found.items())
    assert {name for name in found if name.startswith("sandbox: ")} == {f"sandbox: {name}" for name in LAYERS}
    assert found["compile in a full sandbox"]["works"] is True
    assert found["CUDA C++ for sm_80, sm_89, sm_90, sm_100"]["works"] is True


def test_doctor_puts_exploits_before_the_judge(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from qimeng import cli_exploits
    from qimeng.exploits import EXPLOITS, HONEST_CASES

    flags = [c for c in (*EXPLOITS, *HONEST_CASES) if c.spec == "flags"]
    on_gpu = next(c for c in EXPLOITS if c.needs_gpu)
    monkeypatch.setattr(cli_exploits, "EXPLOITS", (*flags, on_gpu))
    monkeypatch.setattr(cli_exploits, "HONEST_CASES", ())
    monkeypatch.setattr("qimeng.device.current_device", lambda: None)
    assert run("doctor", "--exploits") == 0
    text = capsys.readouterr().out
    assert f"1 of {len(flags) + 1} cases need one and are skipped" in text and "honest (must pass)" in text
    assert text.count("ok  ") == len(flags) >= 2
    honest = next(c for c in flags if c.kind == "honest")
    monkeypatch.setattr(cli_exploits, "EXPLOITS", (replace(honest, kind="reuse", failures=("wrong",)),))
    assert run("doctor", "--exploits", "--json") == 1
    (found,) = json.loads(capsys.readouterr().out)["outcomes"]
    assert found["passed"] and not found["as_expected"] and found["class"] == "reuse"
    assert run("doctor", "--only", "nothing") == 2
    assert "known: timing, reuse" in capsys.readouterr().err


def test_a_summary_for_machines_and_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    for r in (row(1, 1.0), row(2, 0.5), row(3, None)):
        append_row(rows, r)
    assert run("bench", "summary", rows, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["problems"] == 3
    assert found["fast"]["fast_1"] == pytest.approx(2 / 3)
    assert found["groups"][0]["over_eager"] == pytest.approx(8**0.5)
    assert run("bench", "summary", rows) == 0
    text = capsys.readouterr().out
    assert "pointwise and reduction" in text and "not right: level1/3: broke" in text


def test_tables_are_written_into_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_row(tmp_path / "rows.jsonl", row(1, 1.0))
    document = tmp_path / "page.md"
    document.write_text("<!-- bench:figures rows.jsonl -->\n<!-- /bench -->\n")
    assert run("bench", "tables", document, "--root", tmp_path) == 0
    assert "written" in capsys.readouterr().out
    assert "| problems | 1 |" in document.read_text()
    assert run("bench", "tables", document, "--root", tmp_path) == 0
    assert "unchanged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "summary", "/no/such/file"), "cannot read /no/such/file"),
        (("bench", "run"), "name one suite (kernelbench:FOLDER, folder:FOLDER, module:NAME …) or give --root FOLDER"),
        (("bench", "run", "circles"), "no suite called 'circles'; known: kernelbench, folder, module"),
        (("bench", "families", "--root", "/nowhere"), "no KernelBench level 1 under /nowhere"),
        (("optimize", "/no/such.py"), "/no/such.py"),
        (
            ("optimize", "x.py", "--planner", "oracle"),
            "unknown planner 'oracle'; known: heuristic, lm, lower-only, random, roofline, sweep",
        ),
        (("optimize", "x.py", "--coder", "monkey"), "unknown coder 'monkey'"),
        (("optimize", "x.py", "--device", "abacus"), "unknown device 'abacus'"),
        (("show", "/no/such/folder"), "there is no folder /no/such/folder"),
        (("show", __file__), f"name the folder that it is in, {Path(__file__).parent}"),
        (("optimize", "x.py", "--mode", "fast"), "unknown precision mode 'fast'; known: default, highest, high"),
        (("optimize", "x.py", "--dtype", "int8"), "unknown dtype 'int8'"),
        (("optimize", "x.py", "--compile-modes", "faster"), "torch.compile has no mode faster"),
        (("optimize", __file__, "--device", "h200"), "must define Model"),
        (("bench", "tables", "/no/such.md"), "/no/such.md"),
        (("bench", "kernelbench", "--root", "/nowhere", "--mode", "fast"), "unknown precision mode 'fast'"),
        (("bench", "kernelbench", "--root", "/nowhere", "--dtype", "int8"), "unknown dtype 'int8'"),
        (("bench", "kernelbench", "--root", "/nowhere", "--families", "gem"), "unknown family 'gem'; known: attention"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("qimeng: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(("said", "used"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_sleep_while_they_wait_unless_told_otherwise(
    said: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", said or "")
    if said is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    seen: list[str] = []
    monkeypatch.setattr("qimeng.cli.main", lambda: seen.append(os.environ["OMP_WAIT_POLICY"]))
    begin()
    assert seen == [used]
