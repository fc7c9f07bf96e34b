"""A graph that another machine captured is the one that is captured here; what fails there is captured here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import cloudpickle
import pytest
import torch

from qimeng.envs.steps import capturing
from qimeng.envs.steps.capturing import captured
from qimeng.envs.workers.offload import Errand, NotHere, offer
from qimeng.graph.capture import CaptureError
from qimeng.program.program import Program
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


def spec_of(refused: bool = False) -> KernelSpec:
    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ y) + 1

    def by_values(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else y

    return KernelSpec.of(by_values if refused else compute, (torch.randn(8, 8), torch.randn(8, 8)))


@pytest.fixture
def errands() -> Iterator[list[Errand]]:
    """What was sent to another machine, which is this one."""
    sent: list[Errand] = []

    def do(errands: Sequence[Errand]) -> list[bytes | None]:
        sent.extend(errands)
        try:
            return [cloudpickle.dumps(cloudpickle.loads(errand.work)()) for errand in errands]
        except CaptureError:
            return [None]

    offer(do)
    yield sent
    offer(None)


def test_a_graph_from_another_machine_makes_the_same_program(errands: list[Errand]) -> None:
    spec = spec_of()
    for verify in (True, False):
        found, here = captured(spec, verify), capture_spec(spec, verify)
        assert Program.start(found).digest == Program.start(here).digest
        assert (found.call, found.training) == (here.call, here.training)
    assert len(errands) == 2 and len({errand.key for errand in errands}) == 1, "one export serves both"
    offer(None)
    assert Program.start(captured(spec)).digest == Program.start(capture_spec(spec)).digest and len(errands) == 2


def test_what_is_refused_there_is_refused_here_with_the_reason(errands: list[Errand]) -> None:
    spec = spec_of(refused=True)
    with pytest.raises(CaptureError) as there:
        captured(spec)
    with pytest.raises(CaptureError) as here:
        capture_spec(spec)
    assert str(there.value) == str(here.value) and len(errands) == 1


def test_another_version_of_pytorch_captures_nothing() -> None:
    with pytest.raises(NotHere, match="other versions"):
        capturing._export_for_another(spec_of().to_bytes(), 60.0, "torch 1.0")
