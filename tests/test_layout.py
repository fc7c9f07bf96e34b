"""The shape of the package: which part may import which, how long a file may be, what is documented."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

import qimeng
from tests.trees import tree_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "qimeng"
FILE_CAP = 600

LAYERS = (
    {
        "backend",
        "checkpoint",
        "errors",
        "device",
        "device_lock",
        "family",
        "interfaces",
        "graph",
        "library",
        "openmp",
        "plugins",
        "program",
        "recipe",
        "spec",
        "store",
        "version",
    },
    {"actions"},
    {"coder"},
    {"vocabulary"},
    {"envs"},
    {"planner"},
    {"finetune"},
    {
        "api",
        "arguments",
        "cli",
        "bench",
        "cluster",
        "doctor",
        "exploits",
        "integration",
        "report",
        "service",
        "testing",
    },
)
"""Imports point upwards in this list only: a part imports its own layer and those above it."""

OUTSIDE = ("experiments", "benchmarks")
"""Folders that use the package and are not installed with it."""

TOGETHER = [{"backend", "program"}]
"""Parts that import each other, though no file does: a program prints itself through backends, which compile parts of
programs. This list only gets shorter."""

THROUGH_THE_FACE = {"qimeng.spec.spec", "qimeng.envs.workers.forkserver"}
"""Modules that import `qimeng` itself, which may import anything; this list only gets shorter as well."""

LINKS = ("planner", "coder", "actions", "envs")


ROOMS = {
    "envs": ("sandbox", "workers", "errors", "cost", "screening", "judge", "estimate", "steps", "gym"),
    "coder.template": ("nest", "rules", "triton", "cuda", "families"),
}
"""The rooms of a part; each imports only itself and those before it."""


@cache
def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part(path: Path) -> str:
    """`qimeng/envs/steps/loop.py` -> `envs`; `qimeng/cli_bench.py` -> `cli`."""
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "cli" if name.startswith("cli_") else name


def imported_parts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and part of qimeng for every import anywhere in the file, lazy ones included."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            root, _, rest = name.partition(".")
            if root == "qimeng" and rest:
                first = rest.split(".")[0]
                yield node.lineno, "cli" if first.startswith("cli_") else first


def layer(name: str) -> int | None:
    return next((i for i, names in enumerate(LAYERS) if name in names), None)


def test_every_part_has_a_layer() -> None:
    parts = {part(p) for p in modules()} - {"__init__", "__main__"}
    assert not {p for p in parts if layer(p) is None}, "name the layer of this part in LAYERS"


def test_imports_point_one_way() -> None:
    wrong = []
    for path in modules():
        own = layer(part(path))
        if own is None:
            continue  # the package's face may import anything, lazily
        wrong += [
            f"{relative(path)}:{line} is in layer {own} and imports qimeng.{name}, of a later one"
            for line, name in imported_parts(tree_of(path))
            if (other := layer(name)) is not None and other > own
        ]
    assert not wrong, "\n".join(wrong)


def test_no_relative_and_no_bare_imports() -> None:
    wrong = []
    for path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                bare = node.level != 0 or (node.module or "").split(".")[0] in LINKS
            else:
                bare = isinstance(node, ast.Import) and any(a.name.split(".")[0] in LINKS for a in node.names)
            wrong += [f"{relative(path)}:{node.lineno}: say qimeng.…"] if bare else []
    assert not wrong, "\n".join(wrong)


FAMILIES = PACKAGE / "coder" / "template" / "families"

PRINTERS = (PACKAGE / "coder" / "template" / "cuda", PACKAGE / "vocabulary")
"""Folders that print a family's plans in another language, or with an operand of their own, and so know its
schedules."""


@cache
def families() -> frozenset[str]:
    return frozenset(p.name for p in FAMILIES.iterdir() if p.is_dir() and p.name != "__pycache__")


def test_a_family_is_known_in_its_own_folder_alone() -> None:
    wrong = []
    for path in modules():
        if any(folder in path.parents for folder in PRINTERS):
            continue
        own = path.relative_to(FAMILIES).parts[0] if FAMILIES in path.parents else ""
        statement = r"^ *(?:from|import) qimeng\.coder\.template\.families\.(\w+)"
        known = set(re.findall(statement, path.read_text(), re.MULTILINE))
        wrong += [f"{relative(path)} knows {family}" for family in known & (families() - {own})]
    assert not wrong, f"ask the registry (qimeng.family) instead: {wrong}"


def test_the_package_needs_no_experiments() -> None:
    wrong = []
    for path in modules():
        for node in ast.walk(tree_of(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            wrong += [f"{relative(path)}: {name}" for name in names if name.split(".")[0] in OUTSIDE]
    assert not wrong, f"imports of what is not installed with the package: {wrong}"


def test_no_file_is_above_the_cap() -> None:
    folders = (PACKAGE, ROOT / "tests", *(ROOT / name for name in (*OUTSIDE, "examples")))
    lengths = {p: len(p.read_text().splitlines()) for folder in folders for p in folder.rglob("*.py")}
    assert not {relative(p): n for p, n in lengths.items() if n > FILE_CAP}


def test_modules_and_names_that_a_text_refers_to_are_there() -> None:
    paths = [p for folder in ("qimeng", *OUTSIDE) for p in (ROOT / folder).rglob("*.py")]
    texts = {p: p.read_text() for p in paths}
    groups = {name for text in texts.values() for name in re.findall(r'^GROUP = "(.*)"', text, re.MULTILINE)}
    wrong = []
    for path, text in texts.items():
        for reference in set(re.findall(rf"`((?:qimeng|{'|'.join(OUTSIDE)})(?:\.\w+)+)`", text)) - groups:
            place, names = ROOT, reference.split(".")
            while names and (place / names[0]).is_dir():
                place /= names.pop(0)
            home = place / f"{names[0]}.py" if names else place / "__init__.py"
            home, names = (home, names[1:]) if home in texts else (place / "__init__.py", names)
            if names and not re.search(rf"\b{names[0]}\b", texts.get(home, "")):
                wrong.append(f"{relative(path)}: `{reference}`")
    assert wrong == []


@pytest.mark.parametrize("name", LINKS)
def test_links_at_the_top_are_links(name: str) -> None:
    link = ROOT / name
    if not link.exists() and not link.is_symlink():
        pytest.skip("a copy without links works as well")
    assert link.is_symlink()
    assert link.resolve() == (PACKAGE / name).resolve()


def undocumented(tree: ast.Module) -> list[str]:
    """What lacks a docstring: the module, its public names, and the methods of classes that inherit nothing."""
    if not tree.body:
        return []
    missing = [] if ast.get_docstring(tree) else ["the module"]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                missing.append(node.name)
            if isinstance(node, ast.ClassDef) and not node.bases:
                missing += [
                    f"{node.name}.{f.name}"
                    for f in node.body
                    if isinstance(f, ast.FunctionDef) and not f.name.startswith("_") and not ast.get_docstring(f)
                ]
    return missing


def test_public_names_are_documented() -> None:
    missing = {relative(path): found for path in modules() if (found := undocumented(tree_of(path)))}
    assert not missing, f"no docstring: {missing}"


def test_importing_the_package_is_light() -> None:
    heavy = ("transformers", "stable_baselines3", "sb3_contrib", "peft", "gymnasium", "torch", "triton")
    code = f"import sys, qimeng; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_command_line_starts_light() -> None:
    heavy = ("transformers", "stable_baselines3", "peft", "torch", "triton")
    code = f"import sys, qimeng.cli; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_public_face_is_what_all_says() -> None:
    assert qimeng.__all__
    assert [name for name in qimeng.__all__ if not hasattr(qimeng, name)] == []


@pytest.mark.parametrize("part", ROOMS)
def test_rooms_import_those_before_them(part: str) -> None:
    wrong, rooms, folder = [], ROOMS[part], PACKAGE.joinpath(*part.split("."))
    name = re.escape(f"qimeng.{part}")
    for path in (p for room in rooms for p in sorted((folder / room).rglob("*.py"))):
        own = path.relative_to(folder).parts[0]
        for line in path.read_text().splitlines():
            found = re.match(rf"\s*from {name}(?:\.| import )(\w+)", line)
            if found and found[1] in rooms and rooms.index(found[1]) > rooms.index(own):
                wrong.append(f"{relative(path)}: {line.strip()}")
    assert {p.name for p in folder.iterdir() if p.is_dir() and p.name != "__pycache__"} == set(rooms)
    assert not wrong, "\n".join(wrong)


def test_the_tests_of_a_room_are_in_its_folder() -> None:
    tests = ROOT / "tests" / "envs"
    astray = {p.parent.name for p in tests.rglob("test_*.py")} - set(ROOMS["envs"])
    assert not astray, f"tests/envs has a folder for each room ({', '.join(ROOMS['envs'])}); move the tests in {astray}"


# ---- circles: an import counts, whether it stands at the top, in a function or is for types alone


def graph_of(package: Path) -> nx.DiGraph:
    """An edge from each module to every module of the package that it imports, in whatever place."""
    files = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = nx.DiGraph()
    graph.add_nodes_from(files)
    for name, path in files.items():
        graph.add_edges_from((name, other) for other in imported(tree_of(path), files) if other != name)
    return graph


def imported(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (module if module in known else str(node.module) for module in whole)


def circles(graph: nx.DiGraph) -> list[set[str]]:
    return [found for found in nx.strongly_connected_components(graph) if len(found) > 1]


def test_there_are_no_circles() -> None:
    graph = graph_of(ROOT / "qimeng")
    face = {name for name in graph.predecessors("qimeng")}
    assert face <= THROUGH_THE_FACE, "import from the module itself, not from the package's face"
    assert face == THROUGH_THE_FACE, f"shorten the list: {THROUGH_THE_FACE - face}"
    graph.remove_node("qimeng")
    found = circles(graph)
    assert not found, f"a circle of imports: {[nx.find_cycle(graph.subgraph(c)) for c in found]}"


def test_parts_do_not_import_each_other() -> None:
    graph = graph_of(ROOT / "qimeng")
    graph.remove_node("qimeng")
    parts = nx.DiGraph((a.split(".")[1], b.split(".")[1]) for a, b in graph.edges)
    parts.remove_edges_from(list(nx.selfloop_edges(parts)))
    assert circles(parts) == TOGETHER, f"parts that import each other: {circles(parts)}"


@pytest.mark.parametrize(
    "text",
    [
        "from pack.a import x\n",
        "from pack import a\n",
        "import pack.a\n",
        "def f():\n    from pack.a import x\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.a import x\n",
    ],
)
def test_every_import_counts(text: str, tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from pack.b import y\n")
    (package / "b.py").write_text(text)
    assert circles(graph_of(package)) == [{"pack.a", "pack.b"}]
