"""Several processes of one machine that train one model together, each on a GPU of its own.

Deals in processes, what they tell each other, and averages of gradients. Knows nothing about what is trained.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from qimeng.errors import QimengError

Work = Callable[..., None]
"""Called with the member, a function that tells whether to stop, and the arguments of `together`."""

REFUSED = ".refused"
"""End of the name of a file with the error of a member."""


@dataclass(frozen=True)
class Member:
    """One process of those that train together.

    Attributes:
        device: where it computes.
        rank: its number, from 0.
        count: how many there are.
        meeting: file at which they meet.
    """

    device: str = "cpu"
    rank: int = 0
    count: int = 1
    meeting: str = ""

    def join(self) -> None:
        """Meet the others, who come to the file `meeting`.

        Raises:
            RuntimeError: the others cannot be reached.
        """
        on_gpu = self.device.startswith("cuda")
        if on_gpu:
            torch.cuda.set_device(self.device)
        if self.count > 1:
            torch.distributed.init_process_group(
                "nccl" if on_gpu else "gloo", f"file://{self.meeting}", rank=self.rank, world_size=self.count
            )

    def leave(self) -> None:
        """Part from the others."""
        if self.count > 1:
            torch.distributed.destroy_process_group()

    def shared(self, value: float) -> float:
        """What the first member says."""
        if self.count == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64, device=self.device)
        torch.distributed.broadcast(told, 0)
        return float(told.item())

    def average(self, parameters: Iterable[torch.Tensor]) -> None:
        """Put the mean over all members in the place of each gradient."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        whole = torch.cat([g.flatten() for g in gradients])
        torch.distributed.all_reduce(whole)
        for gradient, part in zip(gradients, (whole / self.count).split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def together(work: Work, device: str, count: int, *args: Any) -> None:
    """Run ``work(member, stopped, *args)`` in a process for each of `count` GPUs; in this one where there is no second.

    Ctrl-C and SIGTERM end it at the next look at `stopped`, so that what is there can be kept.

    Args:
        work: a function of a module.
        device: ``"cuda"`` or ``"cpu"``.
        count: of processes.
        args: of `work`, pickled.

    Raises:
        KeyboardInterrupt: it was interrupted, and the work has ended.
        QimengError: the work raised it.
    """
    places = [f"{device}:{rank}" if device == "cuda" else device for rank in range(max(count, 1))]
    stop = get_context("spawn").Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        if len(places) == 1:
            work(Member(places[0]), stop.is_set, *args)
        else:
            with TemporaryDirectory() as folder:
                _spawned(work, places, Path(folder), stop, args)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stop.is_set():
        raise KeyboardInterrupt


def _spawned(work: Work, places: list[str], folder: Path, stop: Any, args: tuple[Any, ...]) -> None:
    """Run the work in processes; what one of them refused is raised here, where people see one sentence."""
    try:
        torch.multiprocessing.spawn(_member, (work, places, folder, stop, args), nprocs=len(places))
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException):
        refused = next(folder.glob(f"*{REFUSED}"), None)
        if refused is None:
            raise
        raise pickle.loads(refused.read_bytes()) from None


def _member(rank: int, work: Work, places: list[str], folder: Path, stop: Any, args: tuple[Any, ...]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):  # the first process says when to stop
        signal.signal(number, signal.SIG_IGN)
    try:
        work(Member(places[rank], rank, len(places), str(folder / "meeting")), stop.is_set, *args)
    except QimengError as error:
        (folder / f"{rank}{REFUSED}").write_bytes(pickle.dumps(error))
        raise


__all__ = ["Member", "Work", "together"]
