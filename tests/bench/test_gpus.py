import os
import subprocess
import sys
from pathlib import Path

import pytest

from qimeng.bench.gpus import GpuError, gpu_places, visible_gpus
from qimeng.bench.pool import Pool


def test_every_gpu_is_a_place_that_shows_its_workers_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    places = gpu_places(2, 4, ("0", "1", "GPU-7"), cores=64)
    assert [p.environment["CUDA_VISIBLE_DEVICES"] for p in places] == ["0", "1"]
    assert [p.slots for p in places] == [4, 4]
    assert {p.environment["OMP_NUM_THREADS"] for p in places} == {"12"}
    assert [p.name for p in gpu_places(0, 1, ("0", "GPU-7"))] == ["gpu 0", "gpu GPU-7"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert gpu_places(1, 1, ("0",), cores=64)[0].environment == {"CUDA_VISIBLE_DEVICES": "0"}


def test_without_a_gpu_there_is_one_place() -> None:
    (place,) = gpu_places(0, 2, (), cores=8)
    assert place.slots == 2 and "CUDA_VISIBLE_DEVICES" not in place.environment
    assert gpu_places(1, 2, ()) == gpu_places(0, 2, ())


def test_more_gpus_than_there_are_is_an_error() -> None:
    with pytest.raises(GpuError, match="--gpus 3: this machine shows 2"):
        gpu_places(3, 1, ("0", "1"))


def test_the_names_of_gpus_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-abc ,7")
    assert visible_gpus() == ("5", "GPU-abc")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus() == ("0", "1")


def environment_of(task: int) -> tuple[str, bool, str, int]:
    """What a worker saw when it was started, and what torch and the processes that it forks see."""
    text = Path("/proc/self/environ").read_text()
    at_start = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    import torch

    child = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    forked = subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip()
    return at_start["CUDA_VISIBLE_DEVICES"], "torch" in sys.modules, forked, torch.get_num_threads()


def test_a_worker_has_its_gpu_before_it_imports_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with Pool(gpu_places(0, 1, ("2", "3"), cores=2)) as pool:
        found = [o.result or ("", False, "", 0) for o in pool.run([1, 2], environment_of, 120.0)]
    assert sorted(f[0] for f in found) == ["2", "3"]
    assert all(f[0] == f[2] and f[3] == 2 for f in found)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
