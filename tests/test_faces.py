"""What each module offers: `__all__` says it, seen from inside the module and from those that import it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.trees import tree_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "qimeng"
USERS = (PACKAGE, ROOT / "experiments", ROOT / "benchmarks", ROOT / "examples")

LAZY = {"qimeng"}
"""Packages whose names are looked up when they are asked for; tests of their own hold them."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(p): p for folder in USERS for p in sorted(folder.rglob("*.py"))}
MODULES = sorted(name for name in FILES if name.split(".")[0] == "qimeng" and name not in LAZY)


def stated(tree: ast.Module) -> list[str] | None:
    """`__all__` as it is written; None where there is none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            found: list[str] = ast.literal_eval(node.value)
            return found
    return None


def defined(tree: ast.Module) -> dict[str, bool]:
    """The public names of a module, and whether each is a function or a class of its own."""
    found: dict[str, bool] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = True
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {(alias.asname or alias.name).split(".")[0]: False for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            found |= dict.fromkeys(names, False)
    return {name: own for name, own in found.items() if not name.startswith("_")}


@cache
def taken() -> dict[str, dict[str, str]]:
    """For each module the names that others import from it, and who does."""
    found: dict[str, dict[str, str]] = {}
    for user, path in FILES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module in FILES:
                modules = {alias.name for alias in node.names if f"{node.module}.{alias.name}" in FILES}
                names = {alias.name: user for alias in node.names if alias.name not in modules}
                found.setdefault(str(node.module), {}).update(names)
    return found


def misstated(name: str) -> Iterator[str]:
    """What is wrong with `__all__` of the module `name`."""
    tree = tree_of(FILES[name])
    names = defined(tree)
    own = {n for n, is_own in names.items() if is_own}
    offered = stated(tree)
    if offered is None:
        if own:
            yield f"{name} needs __all__, for {sorted(own)}"
        return
    if len(offered) != len(set(offered)):
        yield f"__all__ of {name} has a name twice"
    if not set(offered) <= names.keys():
        yield f"__all__ of {name} has what is not there: {set(offered) - names.keys()}"
    if not own <= set(offered):
        yield f"add to __all__ of {name}, or begin with an underscore: {sorted(own - set(offered))}"


def test_every_module_states_what_it_offers() -> None:
    assert MODULES
    wrong = [text for name in MODULES for text in misstated(name)]
    assert not wrong, "\n".join(wrong)


def test_others_take_only_what_is_offered() -> None:
    wrong = []
    for name in MODULES:
        offered, used = stated(tree_of(FILES[name])), taken().get(name, {})
        hidden = {n: user for n, user in used.items() if n.startswith("_") or offered is not None and n not in offered}
        wrong += [f"not offered by {name}, and imported: {hidden}"] if hidden else []
    assert not wrong, "\n".join(wrong)


PACKAGES = sorted(name_of(p) for p in PACKAGE.rglob("__init__.py") if name_of(p) not in LAZY)


def test_a_package_hands_on_what_it_imports() -> None:
    wrong = []
    for name in PACKAGES:
        tree = tree_of(FILES[name])
        imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("qimeng.")]
        if not any(isinstance(n, ast.FunctionDef | ast.ClassDef) for n in tree.body) and imports:
            handed = {alias.asname or alias.name for node in imports for alias in node.names}
            wrong += [name] if handed != set(stated(tree) or ()) else []
    assert not wrong, f"these packages import and offer different names: {wrong}"
