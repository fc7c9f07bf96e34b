"""Compiling on another machine: the same result, the binaries in the cache here, and nothing taken on trust."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
from triton import knobs

from qimeng.backend.compiled import Compiled
from qimeng.device import Device
from qimeng.envs.workers import compile_elsewhere
from qimeng.envs.workers.compile import Compilers
from qimeng.envs.workers.compile_elsewhere import Binaries, OffloadingCompilers, put_into_cache, tools_here
from qimeng.envs.workers.compiled_cache import CompiledCache
from qimeng.envs.workers.foreign_folders import read_folder
from qimeng.envs.workers.offload import Errand, NotHere, offer
from qimeng.envs.workers.shared_server import shared_server
from tests.envs.workers.test_compile import H200, job

HERE = replace(H200, name="h200(here)")
"""A row that says that the device is in this machine, so that binaries are wanted."""


class Other:
    """Another machine, which is this one: it does each errand, and keeps what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.works = True

    def __call__(self, errands: Sequence[Errand]) -> list[bytes | None]:
        self.asked += [errand.key for errand in errands]
        return [cloudpickle.dumps(cloudpickle.loads(e.work)()) if self.works else None for e in errands]


@pytest.fixture
def other() -> Iterator[Other]:
    made = Other()
    offer(made)
    yield made
    offer(None)


def compilers(folder: Path, device: Device = HERE, kind: type[Compilers] = OffloadingCompilers) -> Compilers:
    return kind(shared_server(), device, str(folder), 2, 120.0, "full")


def timeless(found: Sequence[Compiled]) -> list[Compiled]:
    return [replace(c, seconds=0.0) for c in found]


def binaries(folder: Path) -> dict[str, list[str]]:
    """The machine code of each kernel: a binary also holds the folder that its text was compiled in."""
    found = {}
    for path in folder.rglob("*.cubin"):
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[str(path.relative_to(folder))] = re.findall(r"/\*.*\*/", text)
    return found


def test_what_another_machine_compiles_is_what_this_one_would_have(
    other: Other, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_elsewhere, "_can_be_launched", lambda job, came: True)
    jobs = [job(), job(body="v = tl.arange(0, B + 1)"), job("crash", after="\nimport os; os.abort()")]
    there, here = compilers(tmp_path / "there"), compilers(tmp_path / "here", kind=Compilers)
    assert timeless(there.compile(jobs)) == timeless(here.compile(jobs))
    assert len(set(other.asked)) == 3, "a kernel's fault is an answer, which is not asked again here"
    (code,) = binaries(tmp_path / "here").values()
    assert len(code) > 20 and binaries(tmp_path / "there") == binaries(tmp_path / "here")
    (group,) = (tmp_path / "there").rglob("__grp__*.json")
    cache = object.__new__(CompiledCache)
    cache.key = group.parent.name
    monkeypatch.setattr(CompiledCache, "folders", (str(group.parent.parent),))
    listed = cache.get_group(group.name.removeprefix("__grp__"))
    assert listed and all(Path(path).parent == group.parent for path in listed.values()), "where a worker looks"
    assert any(name.endswith(".cubin") for name in listed)


def test_what_nobody_does_is_compiled_here(other: Other, tmp_path: Path) -> None:
    other.works = False
    (found,) = compilers(tmp_path).compile([job()])
    assert found.error is None and len(binaries(tmp_path)) == 1 and len(other.asked) == 1


def test_without_a_driver_there_the_stub_that_launches_is_linked_here(
    other: Other, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[float] = []
    there = compilers(tmp_path)
    start = there._start
    monkeypatch.setattr(there, "_start", lambda job: began.append(0.0) or start(job))
    (found,) = there.compile([job()])
    assert found.error is None and len(other.asked) == len(began) == 1
    assert len(binaries(tmp_path)) == 1, "the binary that came was found"


def test_a_machine_with_other_compilers_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tools_here("triton", H200)
    assert "triton" in tools and "ptxas" in tools and "python" in tools
    with pytest.raises(NotHere, match="other compilers"):
        compile_elsewhere.compile_for_another(job(), H200, tools.replace("torch 2", "torch 1"), 60.0, True)


def made(files: dict[str, bytes]) -> Binaries:
    return Binaries(Compiled(), files, compile_elsewhere._digest(files))


def test_only_what_was_sent_is_written_and_nothing_outside_the_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    good = made({"key/k.cubin": b"binary"})
    assert put_into_cache(good, str(folder)) and (folder / "key" / "k.cubin").read_bytes() == b"binary"
    assert not put_into_cache(replace(good, files={"key/k.cubin": b"damaged"}), str(folder))
    assert (folder / "key" / "k.cubin").read_bytes() == b"binary"
    for name in ("../outside/f", "key/../../outside/f", "/etc/f", "key/.hidden", "f", "a/b/c"):
        assert not put_into_cache(made({name: b"x"}), str(folder)), name
    (folder / "link").symlink_to(outside)
    assert not put_into_cache(made({"link/f": b"x"}), str(folder)), "a candidate's text left a link"
    (outside / "kept").write_bytes(b"secret")
    (folder / "key" / "f").symlink_to(outside / "kept")
    assert put_into_cache(made({"key/f": b"x"}), str(folder)), "the link is replaced"
    assert [path.name for path in outside.iterdir()] == ["kept"] and (outside / "kept").read_bytes() == b"secret"


def test_what_a_candidate_left_in_its_folder_is_read_as_files_alone(tmp_path: Path) -> None:
    folder, secret = tmp_path / "cache", tmp_path / "secret"
    secret.write_bytes(b"secret")
    (folder / "key").mkdir(parents=True)
    (folder / "key" / "k.cubin").write_bytes(b"binary")
    (folder / "key" / "link").symlink_to(secret)
    (folder / "key" / "hard").hardlink_to(secret)
    (folder / "away").symlink_to(tmp_path)
    assert read_folder(folder, 100) == {"key/k.cubin": b"binary"}
    with pytest.raises(OSError, match="6 bytes, 5 are left"):
        read_folder(folder, 5)
