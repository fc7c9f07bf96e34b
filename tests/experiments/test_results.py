"""Stored results and the documents that cite them belong together."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *(d for where in ("docs", "benchmarks", "experiments") for d in (ROOT / where).glob("*.md")),
]
CITED = {
    found for d in DOCUMENTS for found in re.findall(r"\b(?:results|trees)/[\w.]+\.(?:jsonl?|xz)\b", d.read_text())
}


def test_every_stored_result_is_cited() -> None:
    stored = {f"results/{path.name}" for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert not stored - CITED, "cite these in a document or delete them"


def test_every_cited_result_is_stored() -> None:
    missing = {name for name in CITED if not (ROOT / "benchmarks" / name).is_file()}
    assert CITED and not missing, "documents name files that are not there"
