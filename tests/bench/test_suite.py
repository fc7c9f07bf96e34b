from pathlib import Path

import pytest

from qimeng.bench.suite import SuiteError, format_selection, load_kernelbench, load_levels, parse_selection


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "KernelBench" / "level1"
    folder.mkdir(parents=True)
    for name in ("10_Ten", "2_Two_", "1_One"):
        (folder / f"{name}.py").write_text(f"# {name}\n")
    (folder / "notes.py").write_text("")
    return tmp_path


def test_problems_come_in_the_order_of_their_numbers(checkout: Path) -> None:
    problems = load_kernelbench(checkout, 1)
    assert [(p.id, p.name) for p in problems] == [("1/1", "One"), ("1/2", "Two_"), ("1/10", "Ten")]
    assert load_kernelbench(checkout / "KernelBench", 1) == problems
    assert len({p.digest for p in problems}) == 3


def test_a_selection_picks_numbers(checkout: Path) -> None:
    assert [p.number for p in load_kernelbench(checkout, 1, "10,1-2")] == [1, 2, 10]
    with pytest.raises(SuiteError, match="level 1 has no problem 3, 4"):
        load_kernelbench(checkout, 1, "2-4")
    with pytest.raises(SuiteError, match="no KernelBench level 3"):
        load_kernelbench(checkout, 3)
    with pytest.raises(SuiteError, match="cannot read 'x'"):
        load_kernelbench(checkout, 1, "1,x")


@pytest.mark.parametrize("text", ["1", "1,2", "1-3", "1,3,5-9,11,12"])
def test_selections_survive_the_round_trip(text: str) -> None:
    assert format_selection(parse_selection(text)) == text


def test_several_levels_each_with_a_selection_of_its_own(checkout: Path) -> None:
    second = checkout / "KernelBench" / "level2"
    second.mkdir()
    for name in ("1_Uno", "3_Tre"):
        (second / f"{name}.py").write_text(f"# {name}\n")

    def ids(levels: str, selection: str = "") -> list[str]:
        return [p.id for p in load_levels(checkout, levels, selection)]

    assert ids("1,2") == ["1/1", "1/2", "1/10", "2/1", "2/3"]
    assert ids("1,2", "1") == ["1/1", "2/1"]
    assert ids("1,2", "1/2,10; 2/3") == ["1/2", "1/10", "2/3"]
    assert ids("1,2", "2/3") == ["2/3"]
    assert ids("2") == ["2/1", "2/3"]
    with pytest.raises(SuiteError, match=r"'2/3' is of a level that is not asked for \(1\)"):
        load_levels(checkout, "1", "2/3")
    with pytest.raises(SuiteError, match="cannot read 'x'"):
        load_levels(checkout, "1", "x/3")
