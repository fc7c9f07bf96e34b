"""Notebooks run from top to bottom, on the path that this machine has; what is stored of their outputs can be read."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from qimeng.cli import main

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


IN_JUPYTER = "your_own_llm"
"""The notebook that a kernel of Jupyter runs. The others run in this process, where all that they need is started: for
each of theirs, and for each command of theirs, it would be started again."""

SMALLER = {
    "torch.rand(256, 512": "torch.rand(32, 512",
    '"softmax"), 12)': '"softmax"), 3)',
    '("pointwise",), 6)': '("pointwise",), 2)',
    "epochs = 4\n": "epochs = 1\n",
    "others = 7\n": "others = 1\n",
    "episodes = 2\n": "episodes = 1\n",
    "steps = 32\n": "steps = 16\n",
    "imitation.epochs=8": "imitation.epochs=1",
    '"--evaluations", 60': '"--evaluations", 20',
    "evaluations=8, seconds=60": "evaluations=4, seconds=60",
    "torch.nn.Linear(1024, 512), torch.randn(1, 1024)": "torch.nn.Linear(512, 256), torch.randn(1, 512)",
    "512 // BLOCK_N": "256 // BLOCK_N",
    "1024 // BLOCK_K": "512 // BLOCK_K",
}
"""Weights, rows that Triton's interpreter takes one by one, trees, passes over them: fewer where cells run here."""


def test_what_is_made_smaller_is_there() -> None:
    text = "".join(cell.source + "\n" for path in NOTEBOOKS for cell in nbformat.read(path, 4).cells)
    assert [large for large in SMALLER if large not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    book, anew = nbformat.read(path, 4), request.config.getoption("--update-golden")
    if path.stem == IN_JUPYTER or anew:
        run_in_jupyter(book, tmp_path, monkeypatch)
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(subprocess, "run", run_here)
        run_cells([cell.source for cell in book.cells if cell.cell_type == "code"])
    if anew:
        for output in outputs(book):
            if "data" in output and "text/html" in output.data:
                output.data["text/plain"] = "(shown in the notebook)"
        book.metadata = {"kernelspec": book.metadata["kernelspec"], "language_info": {"name": "python"}}
        nbformat.write(book, path)


def run_in_jupyter(book: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill in the notebook's outputs."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(folder / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(book, timeout=600, resources=where, record_timing=False, coalesce_streams=True)
    client.execute()  # raises where a cell does
    assert [text for text in map(text_of, outputs(book)) if text.strip()]


def run_cells(sources: list[str]) -> None:
    """Run the cells one after the other, and show the last expression of each as Jupyter does."""
    names: dict[str, object] = {"__name__": "notebook"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries; in a notebook they end nothing
        for source in sources:
            for large, small in SMALLER.items():
                source = source.replace(large, small)
            tree = ast.parse(source)
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "notebook", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "notebook", "eval"), names)
                getattr(value, "_repr_html_", value.__repr__)()


def run_here(line: list[str], *more: Any, run: Any = subprocess.run, **options: Any) -> Any:
    """`subprocess.run`, but a command of `qimeng` runs in this process."""
    if "qimeng.cli" not in line:
        return run(line, *more, **options)
    shown, wrong, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(shown), redirect_stderr(wrong):
        try:
            main(line[line.index("qimeng.cli") + 1 :])
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(line, code, shown.getvalue(), wrong.getvalue())
