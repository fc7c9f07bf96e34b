"""The measurement of attention and products under masks: cases, what it says without a GPU, a run at small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments import masks
from qimeng.device import current_device
from tests.experiments.scripts import run


def test_the_cases_have_names_of_their_own_and_every_kind() -> None:
    found = masks.cases(tiny=False)
    assert len({c.name for c in found}) == len(found) >= 12
    assert {c.kind for c in found} == set(masks.MASKS) and {c.what for c in found} == set(masks.MODULES)


@pytest.mark.parametrize("kind", masks.MASKS)
def test_masks_hide_most_and_no_query_sees_nothing(kind: str) -> None:
    mask = masks.MASKS[kind](1000, 5)
    assert mask.shape == (1000, 1000) and mask.dtype is torch.bool
    assert bool(mask.any(1).all()) and float(mask.float().mean()) < 0.6
    assert torch.equal(mask, masks.MASKS[kind](1000, 5))


@pytest.mark.skipif(current_device() is not None, reason="there is a GPU")
def test_it_asks_for_a_gpu(tmp_path: Path) -> None:
    done = run("masks", tmp_path / "rows.jsonl")
    assert done.returncode != 0 and "this needs a GPU" in done.stderr


@pytest.mark.slow
def test_it_runs_at_small_sizes_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    done = run("masks", path, "--tiny")
    assert done.returncode == 0, done.stderr
    rows = list(map(json.loads, path.read_text().splitlines()))
    assert [row["case"] for row in rows] == [c.name for c in masks.cases(tiny=True)]
    for row in rows:
        assert {"eager", "torch.compile"} <= row["over"].keys()
        assert row["best_schedule"].startswith(f"{masks.OWN[row['what']]}(")
        assert row["what"] == "edges" or row["over_all_blocks"]
        far = row["largest_difference_over_rms"]
        assert far.keys() == row["turns_ms"].keys() and max(far.values()) < 64 * torch.finfo(torch.float32).eps
