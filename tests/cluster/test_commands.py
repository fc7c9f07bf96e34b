"""The command line of clusters: what is refused says what to do, and `status` lists each GPU."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from qimeng.cli import main
from qimeng.cluster import connection
from qimeng.cluster.connection import connect
from qimeng.cluster.gpus import ClusterError
from qimeng.cluster.optimizing import write_files


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_commands_without_a_cluster_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = tmp_path / "problem.py"
    problem.write_text(
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n"
        "def get_inputs():\n    return [torch.rand(4)]\ndef get_init_inputs():\n    return []\n"
    )
    out = ("--out", tmp_path / "out", "--cluster", "local")
    assert "neither --interactive" in refused(capsys, "optimize", problem, *out, "--interactive")
    assert "--gpus counts the GPUs of this machine" in refused(capsys, "collect", *out, "--gpus", "2")
    assert "a local cluster ends with its command" in refused(capsys, "cluster", "status", "local")


def test_an_address_where_nobody_listens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed (the extra cluster)")
    monkeypatch.setenv(connection.LOOPBACK, "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ClusterError, match="start one with `ray start`"):
        connect(f"127.0.0.1:{port}")


def test_whatever_ray_raises_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise KeyError("/proc/1/stat")

    monkeypatch.setenv(connection.LOOPBACK, "0")
    ray = pytest.importorskip("ray", reason="ray is not installed (the extra cluster)")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ClusterError, match="KeyError: '/proc/1/stat'.*HOST:PORT"):
        connect("auto")
    with pytest.raises(ClusterError, match="'foo' is no cluster: name one as HOST:PORT, auto or local"):
        connect("foo")


def test_which_gpus_this_process_sees_is_told_to_no_other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def init(**options: object) -> None:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        assert os.environ[connection.UV_HOOK] == "0", "Ray looks at no process above this one"

    monkeypatch.setenv(connection.LOOPBACK, "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray = pytest.importorskip("ray", reason="ray is not installed (the extra cluster)")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    connect("auto")
    connect("local")
    assert seen == [None, "7"] and os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "find_spec", lambda name: None)
    with pytest.raises(ClusterError, match=r"pip install 'qimeng\[cluster\]'"):
        connect("local")


def test_files_that_come_back_replace_an_older_store_whole(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite-wal").write_bytes(b"of the older one")
    write_files(tmp_path, {"store.sqlite": b"new", "../report.md": b"text"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.md", "store.sqlite"], "and no file outside"
