from pathlib import Path

import pytest

from experiments.tables import render
from experiments.trust.journal import Journal, read_journal
from experiments.trust.mutants import Plan, subject_key, try_subject
from qimeng.bench.row import Environment, RowError
from qimeng.device import DEVICES

HERE = Environment(device="a machine", commit="0123456789abcdef")


def mutant(key: str, kind: str, found: str, passed: bool, stock: bool = True) -> dict[str, object]:
    verdict = {"failure": None if passed else "wrong", "error": ""}
    verdict |= dict.fromkeys(("max_error", "max_budget", "rms_error", "rms_budget"), 1e-6)
    seen = {"found": found, "error": 1e-5, "times": 40.0, "words": "output 0", "stock": stock, "loose": True}
    return {
        "key": key,
        "what": "mutant",
        "device": "cpu",
        "family": "softmax",
        "dtype": "float32",
        "kind": kind,
        "operator": "a mask dropped",
        "diff": "- a | b\n+ a",
        "witness": seen,
        "search": verdict,
        "final": verdict if passed else None,
    }


def test_a_run_that_is_started_again_finds_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    journal = Journal(path, HERE)
    journal.add("a", value=1)
    journal.add("b", value=2)
    with path.open("a") as out:
        out.write('{"key": "c", "val')  # killed in the middle of a line
    again = Journal(path, HERE)
    assert again.pending(["a", "b", "c"]) == ["c"]
    again.add("c", value=3)
    again.add("a", value=4)
    rows = read_journal(path)
    assert {row["key"]: row["value"] for row in rows} == {"a": 4, "b": 2, "c": 3}
    assert all(row["environment"]["commit"] == HERE.commit and row["at"] for row in rows)


def test_seconds_run_out_and_bad_rows_are_named(tmp_path: Path) -> None:
    assert Journal(tmp_path / "rows.jsonl", HERE, seconds=0).seconds_left <= 0
    with pytest.raises(ValueError, match="of its own"):
        Journal(tmp_path / "rows.jsonl", HERE).add("a", at="today")
    (tmp_path / "other.jsonl").write_text('{"no": "key"}\n')
    with pytest.raises(RowError, match="line 1"):
        read_journal(tmp_path / "other.jsonl")


def test_what_the_oracle_finds_and_the_judge_misses_is_counted_by_class(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rows.jsonl", HERE)
    for row in (
        mutant("0-0", "index", "wrong", passed=True),
        mutant("0-1", "index", "wrong", passed=False, stock=False),
        mutant("0-2", "precision", "right", passed=False),
        mutant("0-3", "precision", "crash", passed=False),
    ):
        journal.add(**row)
    tables = (
        "<!-- bench:mutants rows.jsonl -->\n<!-- /bench -->\n<!-- bench:survivors rows.jsonl -->\n<!-- /bench -->\n"
    )
    text = render(tables, tmp_path)
    assert "| index | 2 | 0 | 2 | 1 | 1 | 50.0 % | 50.0 % | 100.0 % | 0 |" in text
    assert "| precision | 2 | 1 | 0 | 0 | 0 | – | – | – | 1 |" in text
    assert "Triton's interpreter on the CPU, commit 0123456789ab" in text
    assert "| 0-0 (softmax, float32) | index | a mask dropped: `- a \\| b` `+ a` |" in text and "0-1 (" not in text


def test_a_subject_that_says_nothing_without_a_gpu_is_left_out_with_the_reason() -> None:
    plan = Plan("cpu", DEVICES["h200"], seed=1)
    rows = try_subject(plan, 0)
    assert [row["key"] for row in rows] == [subject_key(plan, 0)]
    assert rows[0]["dtype"] == "bfloat16" and "bf16" in rows[0]["left_out"]


def test_seconds_of_an_evaluation_are_split_and_counted_by_the_hour(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rows.jsonl", HERE)
    for place, check in enumerate((1.0, 2.0)):
        parts = {"check": check, "time": 0.5}
        more = {"gate": "passed", "parts": parts, "seconds": check + 0.5, "jobs": 2}
        journal.add(f"0-0-{place}", what="evaluation", device="cuda", **more)
    journal.add("0-0", what="spec", device="cuda", setup_s=3.0, began=100.0, ended=110.0, jobs=2)
    journal.add("0-1", what="spec", device="cuda", left_out="not captured", jobs=2)
    text = render("<!-- bench:cost rows.jsonl -->\n<!-- /bench -->\n", tmp_path)
    assert "| check | 1.50 | 1.50 | 2.00 |" in text and "once a spec | 3.00 | 3.00 | 3.00 |" in text
    assert "| 1 | 2 | 2 | 1800 | 2 | 1440 |" in text and "a machine, commit 0123456789ab" in text


def test_the_medians_of_a_kernel_are_held_against_each_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rows.jsonl", HERE)
    for number, ms in enumerate((1.0, 1.01, 1.02, 1.03, None)):
        journal.add(f"sum-{number}", device="cuda", kernel="sum", spec="sum 8x4096", ms=ms)
    text = render("<!-- bench:stability rows.jsonl -->\n<!-- /bench -->\n", tmp_path)
    assert "| sum | 8x4096 | 5 | 4 | 1.0150 | 1.48 % | 2.96 % |" in text
