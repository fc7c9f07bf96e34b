"""Times by a formula that depends on a program's content alone: nothing is compiled, run or checked.

For trying out what needs some answer whatever it is: the texts that a tokenizer is learnt from, and fakes. Nothing here
may be used to report a speed.
"""

from __future__ import annotations

import hashlib

from qimeng.device import DEVICES, Device
from qimeng.envs.cost.roofline import LAUNCH_MS
from qimeng.envs.steps.time_shares import operator_bound_ms
from qimeng.graph.ops import VIEWS, flops
from qimeng.graph.region import Region
from qimeng.interfaces import Accuracy, Evaluation, EvaluationRequest, Gate, Patch, Resources, SerialEvaluator, Timing
from qimeng.program.program import Program


class FormulaEvaluator(SerialEvaluator):
    """Says of every program that it is right.

    A PyTorch operator takes its roofline bound, a generated region its own bound divided by an efficiency between 0.5
    and 0.95 that the hash of its source decides, and each kernel `LAUNCH_MS` more. Eager takes what the start program
    takes.

    Args:
        device: whose bandwidth and rates count.
        spread: relative spread of every time.
        estimated: what `Timing.estimated` says.
    """

    def __init__(self, device: Device = DEVICES["h200"], spread: float = 0.002, estimated: bool = True):
        self.device, self.spread = device, spread
        self.estimated: bool = estimated

    def answer(self, request: EvaluationRequest) -> Evaluation:
        """The same as `judge`, whatever is asked."""
        return self.judge(request.program, request.patch)

    def judge(self, program: Program, patch: Patch | None = None) -> Evaluation:
        """Of the fastest of the alternatives that is right."""
        if patch is None:
            return self.judged(program)
        count = max(1, len(patch.alternatives))
        found = (self.judged(patch.apply(program, i), i, count) for i in range(count))
        return min(found, key=lambda evaluation: (not evaluation.ok, evaluation.ms or 0.0))

    def judged(self, program: Program, chosen: int = 0, count: int = 1) -> Evaluation:
        """The evaluation of one program, as number `chosen` of `count` alternatives."""
        start = Program.start(program.start_graph)
        eager_ms = sum(self._region_ms(start, r) for r in start.regions) or LAUNCH_MS
        times = {r.id: self._region_ms(program, r) for r in program.called}
        total = sum(times.values()) or LAUNCH_MS
        shares = {
            "generated": sum(times[r.id] for r in program.called if program.implementation(r).generated),
            "library": sum(times[r.id] for r in program.called if program.implementation(r).language == "library"),
        }
        return Evaluation(
            Gate.PASSED,
            timing=Timing(total, self.spread, total + 0.01, 100, self.estimated),
            eager=Timing(eager_ms, self.spread, eager_ms + 0.01, 100, self.estimated),
            chosen=chosen,
            accuracy=Accuracy(1e-7, 1e-8, 1e-5, 1e-6, True, trials=1),
            resources=Resources(32, 0, 0, len(program.regions)),
            region_ms=times,
            generated_share=shares["generated"] / total,
            library_share=shares["library"] / total,
            peak_bytes=0,
            eager_peak_bytes=0,
            configurations=count,
            seconds={"compile": 0.0, "check": 0.0, "time": 0.0},
        )

    def _region_ms(self, program: Program, region: Region) -> float:
        implementation = program.implementation(region)
        if implementation.generated:
            text = hashlib.blake2b(implementation.source.encode(), digest_size=8).hexdigest()
            share = int(text[:8], 16) / 0xFFFFFFFF
            moved = region.bytes_moved() / (self.device.bandwidth_gbs * 1e6)
            work = sum(flops(region.graph, n) for n in region.ops) / (self.device.fp32_tflops * 1e9)
            return max(moved, work) / (0.5 + 0.45 * share) + LAUNCH_MS
        heavy = (n for n in region.ops if n.packet not in VIEWS)
        return sum(operator_bound_ms(region.graph, n, self.device) + LAUNCH_MS for n in heavy)


__all__ = ["FormulaEvaluator"]
