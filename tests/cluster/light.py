"""What a process of a GPU does for these tests: it answers by rules, and is there at once, without PyTorch."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from qimeng.cluster.supervisor import TASK_FOLDER, tell_driver
from qimeng.device import Card
from qimeng.envs.workers.offload import NotHere, done_elsewhere
from qimeng.interfaces import EngineReport, Evaluation, Gate, Timing
from qimeng.interfaces.faults import MACHINE_FAILED


def of_text(text: str, card: Card | None) -> Evaluation:
    """What is to be said of a program with this text."""
    if text.startswith("wrong"):
        return Evaluation(Gate.PROGRAM, "other values", "wrong")
    if text.startswith("busy"):
        return Evaluation(Gate.TIMING, "too busy", "not-timed")
    if text.startswith("broken"):
        return Evaluation(Gate.PROGRAM, "it fell off the bus", MACHINE_FAILED)
    ms = 1 + int(hashlib.sha256(text.encode()).hexdigest()[:6], 16) / 2**24
    return Evaluation(Gate.PASSED, timing=Timing(ms), eager=Timing(2.0), card=card)


def verdict(asked: str, card: Card) -> Evaluation:
    """The answer to a request in JSON."""
    text = json.loads(asked)["fallback"]
    if text.startswith("sleep"):
        time.sleep(float(text.split()[1]))
    if text.startswith("once "):
        begun = Path(text.removeprefix("once "))
        if not begun.exists():  # the next one who is asked answers
            begun.touch()
            time.sleep(600)
    return of_text(text, card)


def make() -> Any:
    """In place of what makes evaluators, which a process would import with PyTorch."""
    raise AssertionError("`answer` makes none")


def answer(make: Callable[[], Any], asked: str) -> tuple[str, EngineReport]:
    """In place of `qimeng.envs.workers.answering.answer`."""
    return verdict(asked, Card(here())).to_json(), EngineReport()


def here() -> str:
    return f"gpu {os.environ.get('CUDA_VISIBLE_DEVICES')} of {os.getppid()}"


def leave_a_file(name: str) -> int:
    (Path(os.environ[TASK_FOLDER]) / name).write_text("here")
    return os.getpid()


def lose_the_gpu(name: str) -> None:
    leave_a_file(name)
    raise RuntimeError("CUDA error: unspecified launch failure")


def send_errands(task: str) -> list[int | None]:
    return done_elsewhere([("process", os.getpid), ("nobody", os.getpid)], 60.0)


def tell(begun: str) -> str:
    tell_driver("first")
    tell_driver(begun)
    while not Path(begun).exists():
        time.sleep(0.05)
    return "done"


def errand_not_on(node: str) -> list[str | None]:
    """Where two errands were done that this node refuses."""
    return done_elsewhere([(f"{n}", partial(_node_but, node)) for n in range(2)], 60.0)


def _node_but(node: str) -> str:
    import ray

    here: str = ray.get_runtime_context().get_node_id()
    if here == node:
        raise NotHere("not on this node")
    return here


def misbehave(what: str) -> str:
    if what == "raise":
        raise ValueError("no")
    if what == "die":
        os._exit(3)
    (Path(os.environ[TASK_FOLDER]) / what.partition(" ")[0]).write_text("was here")
    if what.startswith("sleep"):
        _, _, begun = what.partition(" ")
        if begun:
            Path(begun).write_text("begun")
        time.sleep(600)
    return what
