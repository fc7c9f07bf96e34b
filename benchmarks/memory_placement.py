"""How fast memory streams by where the driver put it: why the judge times eager in turns with every candidate.

Fills the GPU with blocks and times reading each; gives all back and does it again; then the same with a second process
that holds some. Prints one line of JSON a pass: allocator, GiB a block, seconds that taking the memory took, GB/s of
each block.

    python benchmarks/memory_placement.py > placement.jsonl
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import torch

GIB = 1 << 30


def read_gbs(block: torch.Tensor, flush: torch.Tensor) -> float:
    """Median rate of reading `block` over five calls, in GB/s, with the L2 cache flushed."""
    times = []
    for _ in range(5):
        flush.add_(1)
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        block.sum()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return block.nbytes / statistics.median(times) / 1e6


def one_pass(label: str, gib: int, share: float) -> None:
    """Fill `share` of the free memory with blocks of `gib` GiB, print the rate of each, give them back."""
    flush = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
    count = int(torch.cuda.mem_get_info()[0] * share) // (gib * GIB)
    torch.cuda.synchronize()
    began = time.perf_counter()
    blocks = [torch.empty(gib * GIB // 4, device="cuda") for _ in range(count)]
    seconds = round(time.perf_counter() - began, 4)
    for block in blocks:
        block.fill_(1.0)
    rates = [round(read_gbs(block, flush)) for block in blocks]
    print(json.dumps({"label": label, "gib": gib, "seconds": seconds, "gbs": rates}), flush=True)
    del blocks, flush
    torch.cuda.empty_cache()


def main() -> None:
    """The passes of one allocator; without arguments, of both, each in a process of its own."""
    if len(sys.argv) > 1:
        name = sys.argv[1]
        for number in range(3):
            one_pass(f"{name}, pass {number}", 2, 0.9)
        one_pass(f"{name}, large blocks", 8, 0.9)
        one_pass(f"{name}, few blocks", 6, 0.15)
        one_pass(f"{name}, few blocks again", 6, 0.15)
        return
    settings = {
        "malloc": "expandable_segments:False",
        "expandable": "expandable_segments:True",
        "expandable in large pieces": "expandable_segments:True,large_segment_size_mb:256",
    }
    for name, setting in settings.items():  # an older PyTorch does not know the last one
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
        subprocess.run([sys.executable, __file__, name], env=environment, check=False)
    held = torch.ones(20 * GIB // 4, device="cuda")  # another process has memory, and gives half of it back
    halves = [torch.ones(5 * GIB // 4, device="cuda") for _ in range(4)]
    del halves[::2]
    torch.cuda.empty_cache()
    subprocess.run([sys.executable, __file__, "malloc beside another process"], check=True)
    del held


if __name__ == "__main__":
    main()
