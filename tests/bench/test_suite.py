import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qimeng.bench.ids import SuiteError, format_numbers, parse_numbers
from qimeng.bench.kernelbench import KernelBench, load_levels
from qimeng.bench.suite import Problem, Suite, problems_of
from qimeng.bench.suites import FolderSuite, ModuleSuite, suite_named
from qimeng.errors import SpecError
from qimeng.spec import KernelSpec

FILE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * {factor}
def get_inputs():
    return [torch.rand(16, 32)]
def get_init_inputs():
    return []
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "KernelBench" / "level1"
    folder.mkdir(parents=True)
    for name in ("10_Ten", "2_Two_", "1_One"):
        (folder / f"{name}.py").write_text(f"# {name}\n")
    (folder / "notes.py").write_text("")
    return tmp_path


def ids(found: tuple[Problem, ...]) -> list[str]:
    return [p.id for p in found]


def test_kernelbench_comes_in_the_order_of_its_numbers(checkout: Path) -> None:
    found = problems_of(KernelBench(checkout))
    assert [(p.id, p.name, p.group) for p in found] == [
        ("level1/1", "One", "level1"),
        ("level1/2", "Two_", "level1"),
        ("level1/10", "Ten", "level1"),
    ]
    assert problems_of(KernelBench(checkout / "KernelBench")) == found == load_levels(checkout)
    assert len({p.digest for p in found}) == 3


def test_a_selection_picks_numbers(checkout: Path) -> None:
    assert ids(load_levels(checkout, "1", "10,1-2")) == ["level1/1", "level1/2", "level1/10"]
    assert ids(load_levels(checkout, "1", "1/10;1/2;1/1-2")) == ["level1/1", "level1/2", "level1/10"]
    with pytest.raises(SuiteError, match="level 1 has no problem 3, 4"):
        load_levels(checkout, "1", "2-4")
    with pytest.raises(SuiteError, match="no KernelBench level 3"):
        load_levels(checkout, "3")
    with pytest.raises(SuiteError, match="no KernelBench level under"):
        KernelBench("/nowhere")
    with pytest.raises(SuiteError, match="cannot read 'x'"):
        load_levels(checkout, "1", "1,x")


@pytest.mark.parametrize("text", ["1", "1,2", "1-3", "1,3,5-9,11,12"])
def test_selections_survive_the_round_trip(text: str) -> None:
    assert format_numbers(parse_numbers(text)) == text


def test_several_levels_each_with_a_selection_of_its_own(checkout: Path) -> None:
    second = checkout / "KernelBench" / "level2"
    second.mkdir()
    for name in ("1_Uno", "3_Tre"):
        (second / f"{name}.py").write_text(f"# {name}\n")

    def some(levels: str, selection: str = "") -> list[str]:
        return [id.removeprefix("level") for id in ids(load_levels(checkout, levels, selection))]

    assert some("1,2") == ["1/1", "1/2", "1/10", "2/1", "2/3"]
    assert some("1,2", "1") == ["1/1", "2/1"]
    assert some("1,2", "1/2,10; 2/3") == ["1/2", "1/10", "2/3"]
    assert some("1,2", "2/3") == ["2/3"]
    assert some("2") == ["2/1", "2/3"]
    with pytest.raises(SuiteError, match=r"'2/3' is of a level that is not asked for \(1\)"):
        load_levels(checkout, "1", "2/3")
    with pytest.raises(SuiteError, match="cannot read 'x'"):
        load_levels(checkout, "1", "x/3")


def test_patterns_pick_ids(checkout: Path) -> None:
    suite = suite_named(f"kernelbench:{checkout}")
    assert ids(problems_of(suite, "level1/1*")) == ["level1/1", "level1/10"]
    assert ids(problems_of(suite, "level1/10, level1/2")) == ["level1/2", "level1/10"]
    with pytest.raises(
        SuiteError, match=r"no problem of the suite kernelbench is called 'level2/\*'; its ids: level1/1"
    ):
        problems_of(suite, "level1/1,level2/*")


def test_a_folder_is_a_suite_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "norms").mkdir()
    (tmp_path / "_helpers").mkdir()
    for name in ("b10", "b9", "norms/rms", "_helpers/shared", "norms/_base"):
        (tmp_path / f"{name}.py").write_text(FILE.format(factor=len(name)))
    found = problems_of(suite_named(f"folder:{tmp_path}"))
    assert [(p.id, p.group) for p in found] == [("b9", ""), ("b10", ""), ("norms/rms", "norms")]
    spec = found[2].spec("bfloat16", "high")
    assert (spec.dtype, spec.mode, found[2].spec().dtype) == ("bfloat16", "high", "float32")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SuiteError, match="holds no problem file"):
        FolderSuite(tmp_path / "empty")
    with pytest.raises(SuiteError, match="no folder"):
        FolderSuite(tmp_path / "none")


def test_a_python_module_is_a_suite_of_its_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_kernels.py").write_text(
        "import torch\n"
        "from math import gcd\n"
        "from qimeng.spec import KernelSpec\n"
        "double = KernelSpec.from_function(lambda x: x * 2, (torch.rand(4),), name='twice')\n"
        "def softmax():\n"
        "    return KernelSpec.from_function(torch.nn.functional.softmax, (torch.rand(2, 8),), dtype='bfloat16')\n"
        "def broken():\n"
        "    raise ValueError('no such size')\n"
        "def helper(n):\n"
        "    return n\n"
        "def _private():\n"
        "    return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {p.id: p for p in problems_of(suite_named("module:my_kernels"))}
    assert list(found) == ["double", "softmax", "broken"]
    assert found["softmax"].spec().dtype == "bfloat16" and found["softmax"].spec("float16").dtype == "float16"
    assert len({found["double"].digest, found["softmax"].digest, ""}) == 3 and found["broken"].digest == ""
    with pytest.raises(SpecError, match="problem broken of the suite my_kernels cannot be made .*no such size"):
        found["broken"].spec()
    with pytest.raises(SuiteError, match="cannot import the module my_kernels.none"):
        ModuleSuite("my_kernels.none")


class Squares(Suite):
    """A suite as another package has it."""

    name = "squares"

    def __init__(self, size: str = "4"):
        self.size = int(size)

    def problems(self) -> Iterator[tuple[str, Any]]:
        for factor in (2, 3):
            yield f"scaled/{factor}", KernelSpec.from_function(lambda x, f=factor: x * f, (torch.rand(self.size),))
        yield "plain", lambda: KernelSpec.from_function(torch.square, (torch.rand(self.size),))

    def group(self, id: str) -> str:
        return "easy" if id == "plain" else "scaled"


@contextlib.contextmanager
def installed(folder: Path, value: str) -> Iterator[None]:
    """A package on the path whose metadata names an entry point."""
    about = folder / "squares-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: squares\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[qimeng.suites]\nsquares = {value}\n")
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def test_an_installed_package_brings_a_suite(tmp_path: Path) -> None:
    with installed(tmp_path, f"{__name__}:Squares"):
        found = problems_of(suite_named("squares:8"))
        assert [(p.suite, p.id, p.group) for p in found] == [
            ("squares", "scaled/2", "scaled"),
            ("squares", "scaled/3", "scaled"),
            ("squares", "plain", "easy"),
        ]
        assert all(p.spec("float16").dtype == "float16" for p in found)
        assert len(problems_of(suite_named("squares"))) == 3
        with pytest.raises(SuiteError, match="'squares' of the installed package squares cannot be used .*'x'"):
            suite_named("squares:x")
        with pytest.raises(SuiteError, match="known: kernelbench, folder, module, squares"):
            suite_named("circles")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no.such.module:Suite", "installed package squares cannot be used .*No module named 'no'"),
        ("builtins:dict", "installed package squares is a dict, no qimeng.bench.suite.Suite"),
    ],
)
def test_a_broken_package_is_named(value: str, message: str, tmp_path: Path) -> None:
    with installed(tmp_path, value), pytest.raises(SuiteError, match=message):
        suite_named("squares")


class Given(Suite):
    name = "given"

    def __init__(self, *pairs: Any):
        self.pairs = pairs

    def problems(self) -> Iterator[tuple[str, Any]]:
        for pair in self.pairs:
            if isinstance(pair, Exception):
                raise pair
            yield pair


class Nameless(Suite):
    def problems(self) -> Iterator[tuple[str, Any]]:
        yield "a", made


def test_a_suite_without_a_name_is_told_so() -> None:
    with pytest.raises(SuiteError, match=f"the suite {__name__}.Nameless has no name, which rows need"):
        problems_of(Nameless())


def made() -> KernelSpec:
    return KernelSpec.from_function(torch.sin, (torch.rand(4),))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("a", made), ("a", made)], "the suite given gives the id 'a', which is empty, no text or there twice"),
        ([("", made)], "gives the id ''"),
        ([("a", 3)], "the suite given gives a int for a; it takes a KernelSpec"),
        ([OSError("disk gone")], r"the suite given cannot list its problems \(OSError: disk gone\)"),
    ],
)
def test_a_suite_that_breaks_the_rules_is_told_so(pairs: list[Any], message: str) -> None:
    with pytest.raises(SuiteError, match=message):
        problems_of(Given(*pairs))


def test_what_is_no_spec_is_refused_when_its_turn_comes() -> None:
    (problem,) = problems_of(Given(("a", lambda: "text")))
    with pytest.raises(SpecError, match="problem a of the suite given is a str; a suite gives a KernelSpec"):
        problem.spec()
