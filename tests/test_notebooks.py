"""Notebooks run from top to bottom, on the path that this machine has; what is stored of their outputs can be read."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))

LARGEST = 64 << 10
"""Bytes of a notebook with its outputs: they are text."""


def outputs(book: Any) -> list[Any]:
    return [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]


def text_of(output: Any) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))


def test_there_is_one_for_each_subject() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "adding_an_action", "first_kernel", "reading_a_report", "training_a_planner", "your_own_llm",
    ]  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_stored_small_and_without_places_or_errors(path: Path) -> None:
    book = nbformat.read(path, 4)
    nbformat.validate(book)
    shown = [text_of(output) for output in outputs(book)]
    assert shown and path.stat().st_size < LARGEST
    assert not [o for o in outputs(book) if o.output_type == "error" or o.get("name") == "stderr"]
    assert not [text for text in shown if re.search(r"(?<![\w.])/(home|root|tmp|work|usr|opt)/|\x1b| at 0x", text)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_links_lead_somewhere(path: Path) -> None:
    texts = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown"]
    links = [link for text in texts for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)]
    assert links and not [link for link in links if not (path.parent / link).exists()]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    book = nbformat.read(path, 4)
    where = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(book, timeout=600, resources=where, record_timing=False, coalesce_streams=True)
    client.execute()  # raises where a cell does
    assert [text for text in map(text_of, outputs(book)) if text.strip()]
    if request.config.getoption("--update-golden"):
        for output in outputs(book):
            if "data" in output and "text/html" in output.data:
                output.data["text/plain"] = "(shown in the notebook)"
        book.metadata = {"kernelspec": book.metadata["kernelspec"], "language_info": {"name": "python"}}
        nbformat.write(book, path)
