"""A judge for each region of a network: what a patch changes is checked and timed alone.

Deals in which judge a request goes to. The judges of regions are of the same kind as the one of the whole program, with
the same gates, distributions and clocks (`qimeng.envs.judge.region_spec`). Knows nothing about searches, or about when
the whole program is judged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import torch

from qimeng.envs.judge.device_turns import DeviceTurns
from qimeng.envs.judge.region_spec import RegionSpec, region_spec
from qimeng.envs.judge.time_spent import Clock
from qimeng.errors import IllegalAction, QimengError
from qimeng.graph.region import Region
from qimeng.interfaces import (
    Asked,
    EngineReport,
    Evaluation,
    EvaluationRequest,
    Evaluator,
    Fault,
    Patch,
    Scope,
    SerialEvaluator,
    Ticket,
)
from qimeng.program.program import Program
from qimeng.spec import KernelSpec

MANY_REGIONS = 12
"""Regions of a start program from which on patches are judged on their region. Below that, a whole program is run,
checked and timed in about the time of one of its regions."""
OPEN = 6
"""Judges of regions that are open at a time, each with processes and memory on the device. The one that was asked least
recently is closed."""


class RegionJudges(SerialEvaluator):
    """The judge of a network and, opened when asked for, judges of its regions.

    A request with `Asked.REGION` is answered by the judge of the region that its patch is about; equal regions have one
    judge. All other requests go to the judge of the whole, and so does a patch on a region that cannot be judged alone.

    Args:
        whole: judges whole programs.
        spec: of the whole.
        make: makes the judge of a region.
        device: PyTorch's name of the device that the eager run of the whole is made on.
        turns: on that device, of which that run takes one, so that it disturbs no measurement.
    """

    def __init__(
        self,
        whole: Evaluator,
        spec: KernelSpec,
        make: Callable[[RegionSpec], Evaluator],
        device: str,
        turns: DeviceTurns | None = None,
    ):
        self.whole, self.spec, self.make, self.device = whole, spec, make, device
        self.turns, self._clock = turns or DeviceTurns(None), Clock()
        self.version, self.estimated = whole.version, whole.estimated
        self._open: OrderedDict[str, tuple[RegionSpec, Evaluator]] = OrderedDict()
        self._refused: dict[str, str] = {}
        self._closed: dict[str, float] = {}

    @property
    def name(self) -> str:
        """That of the judge of the whole."""
        return self.whole.name

    @property
    def report(self) -> EngineReport:
        """That of the judge of the whole, with the seconds of the judges of regions and of opening them."""
        seconds = dict(self.whole.report.seconds)
        for spent in (self._clock.seconds, self._closed, *(judge.report.seconds for _, judge in self._open.values())):
            _add(seconds, spent)
        return replace(self.whole.report, seconds=seconds)

    def submit(self, request: EvaluationRequest) -> Ticket:
        """Take a request; the judge of the whole may begin what takes long."""
        if request.asked is not Asked.REGION:
            self.whole.submit(request)
        return super().submit(request)

    @property
    def prepares(self) -> bool:
        """As it says."""
        return self.whole.prepares

    def prepare(self, request: EvaluationRequest) -> None:
        """Told to the judge of the whole, whose compilers all judges share."""
        self.whole.prepare(request)

    def answer(self, request: EvaluationRequest) -> Evaluation:
        """The answer of the region's judge, or of the whole's."""
        if request.asked is not Asked.REGION or request.patch is None or request.patch.target is None:
            return self.whole.ask(request)
        if (aside := self.whole.left_aside(request)) is not None:  # before a judge is opened for it
            return replace(aside, scope=Scope.REGION)
        program = request.candidates[0]
        region = program.region(request.patch.target)
        try:
            alone, judge = self._judge_of(program, region)
        except IllegalAction as reason:
            found = self.whole.ask(replace(request, asked=Asked.TIMING))
            return replace(found, notes=(*found.notes, f"judged as a whole program: {reason}"))
        patch = Patch(target=alone.region.id, alternatives=request.patch.alternatives)
        found = judge.ask(EvaluationRequest(alone.program, patch, library_seconds=request.library_seconds))
        if found.fault in (Fault.MACHINE, Fault.JUDGE):  # it could not go on, which says nothing about the patch
            return self.whole.ask(replace(request, asked=Asked.TIMING))
        return replace(found, scope=Scope.REGION)

    def close(self) -> None:
        """Close every judge."""
        while self._open:
            self._close_oldest()
        vars(self).pop("_reference", None)
        self.turns.close()
        self.whole.close()

    # -- parts

    @cached_property
    def _reference(self) -> torch.nn.Module:
        """The whole module, for eager runs."""
        return self.spec.module(self.device)

    def _judge_of(self, program: Program, region: Region) -> tuple[RegionSpec, Evaluator]:
        """The region alone, and its judge.

        Raises:
            IllegalAction: it cannot be judged alone.
        """
        key = region.signature
        if key in self._refused:
            raise IllegalAction(self._refused[key])
        if key not in self._open:
            while len(self._open) >= OPEN:
                self._close_oldest()
            try:
                with self.turns.turn("reference", self._clock):
                    alone = region_spec(self.spec, program, region, self.device, self._reference)
                if self.device == "cuda":
                    torch.cuda.empty_cache()
                self._open[key] = alone, self._made(alone)
            except (QimengError, RuntimeError) as error:  # memory that runs out is a RuntimeError too
                self._refused[key] = str(error)
                raise IllegalAction(self._refused[key]) from error
        self._open.move_to_end(key)
        return self._open[key]

    def _made(self, alone: RegionSpec) -> Evaluator:
        """The judge of a region; what it does not count of the time that it takes to make counts as its start."""
        before = self._clock.now()
        judge = self.make(alone)
        own = sum(judge.report.seconds.values())
        _add(self._clock.seconds, {"start": max(self._clock.now() - before - own, 0.0)})
        return judge

    def _close_oldest(self) -> None:
        _, (_, judge) = self._open.popitem(last=False)
        with self._clock.part("judge"):
            judge.close()
        _add(self._closed, judge.report.seconds)


def _add(total: dict[str, float], seconds: Mapping[str, float]) -> None:
    for part, value in seconds.items():
        total[part] = total.get(part, 0.0) + value


__all__ = ["MANY_REGIONS", "OPEN", "RegionJudges"]
