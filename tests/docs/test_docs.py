"""The documents tell the truth: their blocks run, the commands and files they name are there."""

from __future__ import annotations

import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

import qimeng
from qimeng.actions import Context, kinds, legal_actions, unregister
from qimeng.coder.template.coder import TemplateCoder
from qimeng.device import DEVICES
from qimeng.errors import QimengError
from qimeng.family import unregister_family
from qimeng.interfaces import LASTING
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.report.meanings import MEANINGS
from qimeng.spec.declared import unregister_weights
from qimeng.testing import FakeEvaluator
from tests.interpreted import ended

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(path for name in ("docs", "benchmarks", "experiments") for path in (ROOT / name).glob("*.md")),
    ]
)
EXTENDING = ROOT / "docs" / "extending.md"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def blocks(path: Path, language: str, section: str = "") -> list[str]:
    text = path.read_text()
    if section:
        text = next(s for s in re.split(r"^## ", text, flags=re.MULTILINE) if s.startswith(section + "\n"))
    return [body for name, body in _BLOCK.findall(text) if name == language]


def sections(path: Path) -> list[str]:
    return [s for s in re.findall(r"^## (.*)$", path.read_text(), re.MULTILINE) if blocks(path, "python", s)]


SLOW = {"A coder", "A device", "In Python"}


def cases(path: Path) -> list[object]:
    return [pytest.param(s, marks=[pytest.mark.slow] if s in SLOW else []) for s in sections(path)]


@pytest.mark.parametrize("section", cases(EXTENDING))
def test_every_block_of_extending_runs(section: str) -> None:
    names: dict[str, object] = {"__name__": "document"}
    try:
        for number, block in enumerate(blocks(EXTENDING, "python", section)):
            exec(compile(block, f"extending.md, {section} [{number}]", "exec", dont_inherit=True), names)
    finally:
        unregister("double_rows")
        unregister_family("flat_relu")
        unregister_weights("signs")


def test_the_block_about_stored_weights_declares_them() -> None:
    names: dict[str, Any] = {}
    for block in blocks(ROOT / "docs" / "lowprecision.md", "python"):
        exec(compile(block, "lowprecision.md", "exec", dont_inherit=True), names)
    assert names["spec"].weights == "int4:64" and names["both"].activations == "fp8"


def test_the_block_about_weights_with_zeros_declares_them() -> None:
    (block,) = blocks(ROOT / "docs" / "sparse.md", "python")
    names: dict[str, Any] = {}
    exec(compile(block, "sparse.md", "exec", dont_inherit=True), names)
    assert names["spec"].weights == "bsr:64:25"


def test_the_block_about_irregular_computations_makes_a_layer() -> None:
    (block,) = blocks(ROOT / "docs" / "irregular.md", "python")
    names: dict[str, Any] = {}
    exec(compile(block, "irregular.md", "exec", dont_inherit=True), names)
    program = Program.start(capture_spec(names["spec"], verify=False))
    context = Context(DEVICES["h100"], TemplateCoder())
    assert "aggregate" in {a.kind for a in legal_actions(program, context)}


@pytest.mark.slow
def test_the_block_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(ROOT / "README.md", "python", "In Python")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "document"}
    exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "runs" / "layer" / "program.py").exists()
    assert names["result"].verification == "right, in a fresh process"


def test_an_installed_package_adds_its_kind(tmp_path: Path) -> None:
    """The document's file and entry point, laid out as pip would install them: the command line lists the kind."""
    module = next(b for b in blocks(EXTENDING, "python") if b.startswith("# file: double_rows.py"))
    (tmp_path / "double_rows.py").write_text(module)
    (text,) = blocks(EXTENDING, "toml", "A kind of action")
    ((group, entries),) = tomllib.loads(text)["project"]["entry-points"].items()
    installed = tmp_path / "double_rows-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: double-rows\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {where}" for name, where in entries.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines) + "\n")
    code = "import sys; sys.path[:0] = sys.argv[1:]; from qimeng.cli import main; main(['actions', '--json'])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert '"double_rows"' in done.stdout and "Give each program twice the rows." in done.stdout


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_a_document_links_to_is_there(path: Path) -> None:
    text = _BLOCK.sub("", path.read_text())
    assert not [link for link in _LINK.findall(text) if not (path.parent / link).exists()]
    sections = re.findall(r"\]\(([\w./-]*\.md|)#([\w-]+)\)", text)
    assert not [name for file, name in sections if name not in _sections(path.parent / file if file else path)]


@cache
def _sections(path: Path) -> set[str]:
    """What links call the sections of a document."""
    heads = re.findall(r"^#+ (.+)$", _BLOCK.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_paths_that_a_document_names_are_there(path: Path) -> None:
    """Backquoted paths of this repository, and dotted names of the package."""
    text = _BLOCK.sub("", path.read_text())
    paths = re.findall(r"`((?:qimeng|tests|docs|examples|notebooks|benchmarks|experiments)/[\w./-]*)`", text)
    assert not [p for p in paths if p.endswith(("/", ".py", ".md")) and not (ROOT / p).exists()]
    for name in re.findall(r"`(qimeng(?:\.\w+)+)`", text):
        assert _exists(name), name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_commands_that_a_document_names_exist(path: Path) -> None:
    text = path.read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)|`make (\w+)`", text, re.MULTILINE)) <= {
        pair for t in targets for pair in ((t, ""), ("", t))
    }
    from qimeng.cli import app

    whole = get_command(app)
    for line in re.findall(r"(?:^|`)qimeng ((?:[a-z].*?))(?:$|`)", text, re.MULTILINE):
        words, command = line.partition("#")[0].split(), whole
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]  # type: ignore[attr-defined]
        alone = getattr(command, "invoke_without_command", True)  # a group that does something by itself is a command
        assert alone or not getattr(command, "commands", {}), f"qimeng {line}: no such command"
        known = {option for parameter in command.params for option in parameter.opts}
        assert {w for w in words if w.startswith("--")} <= known, f"qimeng {line}: no such option"


def _exists(name: str) -> bool:
    import importlib

    module, rest = name, []
    while module:
        try:
            found: object = importlib.import_module(module)
        except ImportError:
            module, _, last = module.rpartition(".")
            rest.insert(0, last)
            continue
        for attribute in rest:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def test_every_code_of_an_error_is_explained() -> None:
    for _, name, _ in pkgutil.walk_packages(qimeng.__path__, "qimeng."):
        if ".exploits." not in name and ".lm.shipped" not in name:
            importlib.import_module(name)
    found, open_ = {}, [QimengError]
    while open_:
        cls = open_.pop()
        open_ += cls.__subclasses__()
        if cls.__module__.startswith("qimeng."):
            assert "code" in vars(cls) or QimengError not in cls.__bases__, f"{cls.__name__} needs a code of its own"
            if "code" in vars(cls):
                assert found.setdefault(cls.code, cls) is cls, f"two errors have the code {cls.code}"
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    explained = re.findall(r"`(\w+)`", "\n".join(re.findall(r"^### (.*)$", text, re.MULTILINE)))
    assert sorted(explained) == sorted({*found, "file"})


def test_the_glossary_has_every_row_of_a_report() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text()
    source = (ROOT / "qimeng" / "envs" / "steps" / "result.py").read_text()
    labels = re.findall(r'found.append\(\(f?"([^"{,]+)', source)
    assert len(labels) > 8
    assert [label for label in labels if label.strip() not in text.replace("error, maximum and rms", "error")] == []
    rows = dict(re.findall(r"^\| ([^|*`]+) \| (.*) \|$", text.partition("## Rows of a report")[2], re.MULTILINE))
    assert {row: re.sub("[*`]", "", rows[row]) for row in MEANINGS} == MEANINGS
    assert [name for name in LASTING if f"`{name}`" not in text] == []


@cache
def pages() -> ModuleType:
    """What makes the site's pages from the library."""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_name_that_documents_import() -> None:
    """Those of documents, notebooks and examples; that it has all public names of its modules, the site's test says."""
    rooms = (*pages().USERS, *pages().AUTHORS)
    shown = {path for room in rooms for path, _ in pages().public(room)}
    text = "\n".join(p.read_text() for p in (*DOCUMENTS, *(ROOT / "examples").glob("*.py")))
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        text += "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    missing = set()
    for room, names in re.findall(r"^from (qimeng[\w.]*) import \(?([\w, \n]+)\)?$", text, re.MULTILINE):
        for name in filter(None, re.split(r"[,\s]+", names)):
            thing = inspect.unwrap(getattr(importlib.import_module(room), name))
            own = inspect.isclass(thing) or inspect.isfunction(thing)
            path = f"{thing.__module__}.{thing.__qualname__}" if own else f"{room}.{name}"
            if path not in shown and not any(f"{r}.{name}" in shown for r in rooms):
                missing.add(f"{room}.{name}")
    assert missing == set()


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = ended("-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path), NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0 and not done.stderr, done.stderr
    for page in ("index", "tutorial", "commands", "gallery", "api", "results", *(f"actions/{k}" for k in kinds())):
        assert (tmp_path / f"{page}.html").stat().st_size > 5000, page
    api = "".join((tmp_path / f"{page}.html").read_text() for page in ("api", "extension_api"))
    named = [path for room in (*pages().USERS, *pages().AUTHORS) for path, _ in pages().public(room)]
    assert [path for path in named if f'id="{path}"' not in api] == []


def test_the_blocks_of_the_tutorial_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fake judge, which needs no time: the real one has tests of its own."""
    fake = lambda spec, start, context, **unused: FakeEvaluator(context.device, estimated=True)  # noqa: E731
    monkeypatch.setattr("qimeng.envs.steps.setup.make_evaluator", fake)
    names: dict[str, object] = {"__name__": "document"}
    for number, block in enumerate(blocks(ROOT / "docs" / "tutorial.md", "python")):
        block = block.replace("seconds=30", "seconds=12, compile_modes=()").replace(
            "seconds=60", "seconds=14, cache=False"
        )
        exec(compile(block, f"tutorial.md [{number}]", "exec", dont_inherit=True), names)
