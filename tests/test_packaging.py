"""What a built package holds: qimeng, its types and its licence, and none of the links at the top."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from qimeng.version import VERSION

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_the_declared_versions_are_those_that_are_tested() -> None:
    """3.11 on the machine that the tests run on, 3.12 on the one with a GPU; README and metadata say the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert named == {"3.11", "3.12"} and project["requires-python"] == ">=3.11,<3.13"
    assert "Python 3.11 or 3.12" in (ROOT / "README.md").read_text()
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in named


def test_the_package_and_its_metadata_have_one_version() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION


@pytest.mark.slow
def test_the_wheel_holds_the_package_only(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"qimeng"}
    assert "qimeng/py.typed" in names and "qimeng/planner/__init__.py" in names
    assert "qimeng/coder/llm/prompts/system.md" in names
    assert "qimeng/planner/lm/shipped/model.safetensors" in names
    assert not [n for n in names if "__pycache__" in n]
    (entries,) = (n for n in names if n.endswith("entry_points.txt"))
    assert "qimeng = qimeng.__main__:main" in zipfile.ZipFile(wheel).read(entries).decode()


@pytest.mark.slow
def test_the_source_distribution_has_no_links(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert not [m.name for m in members if m.issym() or m.islnk()]
    tops = {m.name.split("/")[1] for m in members}
    assert not tops & {"planner", "coder", "actions", "envs", "experiments", "benchmarks"}
    assert {"qimeng", "LICENSE", "README.md", "pyproject.toml"} <= tops
