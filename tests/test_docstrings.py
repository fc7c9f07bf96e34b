"""The examples in docstrings give what they say.

Only files with an example are imported. `pytest --doctest-modules` would import every module, tests too, and look for
examples in each of their names: ten seconds in each process of pytest.
"""

from __future__ import annotations

import doctest
import importlib
import linecache
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def with_examples() -> list[str]:
    """The names of the modules that have examples."""
    found = []
    for folder in ("qimeng", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            if "__pycache__" not in path.parts and re.search(r"^ *>>> ", path.read_text(), re.MULTILINE):
                parts = path.relative_to(ROOT).with_suffix("").parts
                found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(found)


@pytest.mark.parametrize("name", with_examples())
def test_examples_give_what_they_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linecache, "checkcache", lambda *_: None)  # looks at every file, before each example
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed, f"python -m doctest shows what differs in {name}"
