"""What Triton makes of the kernels: no thread holds a copy of a whole row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from qimeng.coder.template.coder import TemplateCoder
from qimeng.coder.template.families.tile.schedule import TileSchedule
from qimeng.device import device_named
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.family import covering
from qimeng.graph.capture import capture
from qimeng.graph.region import make_region

SHARED_ROW = [
    TileSchedule("wave", block_r=8192, lag=8, warps=8, stages=1),
    TileSchedule("cooperative", block_r=8192, per_sm=2, warps=8, stages=1),
    TileSchedule("split", block_r=8192, splits=4, warps=8, stages=1),
]


@pytest.mark.parametrize("schedule", SHARED_ROW, ids=lambda s: s.form)
def test_what_programs_share_is_broadcast_without_a_copy_of_the_row_in_every_thread(
    schedule: TileSchedule, tmp_path: Path
) -> None:
    norm = torch.nn.LayerNorm(65536, elementwise_affine=False)
    graph = capture(lambda: norm, lambda: (torch.empty(512, 65536),))
    region = make_region(graph, [n.name for n in graph.ops()])
    assert covering(region)[1].passes == 1
    job = job_of(region, TemplateCoder().print(region, schedule))
    (found,) = Compilers(shared_server(), device_named("h200"), str(tmp_path)).compile([job])
    assert found.error is None
    texts = [path.read_text() for path in tmp_path.rglob("*.ttgir")]
    assert texts
    for text in texts:
        layouts = re.findall(
            r"(#\w+) = #ttg.blocked<.*threadsPerWarp = \[\d+, (\d+)\], warpsPerCTA = \[\d+, (\d+)\]", text
        )
        copied = [name for name, threads, warps in layouts if int(threads) * int(warps) == 1]
        tiles = re.findall(r"tensor<1x(\d+)x\w+, (#\w+)>", text)
        assert tiles
        assert not [tile for tile in tiles if int(tile[0]) >= 1024 and tile[1] in copied]
