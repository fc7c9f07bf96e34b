"""A planner by rule: fuse, lower, then work on the region that takes the most time until it is near the roofline.

Deals in regions, their share of the time, and what was tried already. Knows nothing about kernels or about how an
action is carried out. It is the baseline that a trained planner must beat.
"""

from __future__ import annotations

from collections import Counter

from qimeng.actions import Kind, kinds
from qimeng.actions.large import is_large, unlike
from qimeng.errors import IllegalAction, KindFault, QimengError
from qimeng.family import Unsupported, covering
from qimeng.graph.region import Region
from qimeng.interfaces import Action, Observation, Planner
from qimeng.planner.heuristic_facts import (
    at_roofline,
    by_time,
    convolves_halves,
    has_product,
    intents_in_order,
    library_first,
    torch_ms,
    tried_before,
)

SMALL_SHARE = 0.04
"""Regions below this share of the program's time are not tuned."""

SMALL_SHARE_OF_MANY = 0.005
"""The same in a large program, for all equal regions together."""

LEAST_MS = 0.004
"""Milliseconds below which a kernel takes hardly longer than an empty one (2 to 3 us on an H200): no tuning gains."""

HOPELESS, SLOWER = 1.5, 1.05
"""A kernel slower than PyTorch by the first factor is given up without tuning. One slower by the second factor is given
up after tuning."""


MANY = 8
"""Kernels from which on launching them one by one may cost more than the copies of a recorded CUDA graph."""

WAITS = 1.5
"""A program that takes so many times as long as its regions together waits for the host that launches its kernels."""

STEADY = 1.03
"""A recorded program may take this many times as long as one launched kernel by kernel, and stays: copies of its inputs
are what it takes longer, and it does not wait for a host that other work keeps busy."""


class HeuristicPlanner(Planner):
    """Fuses all it can, lowers every region, then tunes the slowest ones. It keeps no state between calls.

    Args:
        patience: give up on a region after this many attempts in a row without gain.
    """

    def __init__(self, patience: int = 4):
        self.patience = patience

    def choose(self, observation: Observation) -> Action:
        """The first applicable of several kinds.

        In order: algebra, what its kind calls promising, fusion, lowering, fusion with what is left to the library,
        tuning, a CUDA graph and TorchInductor's code of the whole program, stop. Fusion ends where the steps left are
        needed for lowering. Tuning begins with the form of a reduction, then fast special functions where a region has
        such functions (the action is offered) and memory is not what binds it. Where kernels wait for the host, the
        CUDA graph comes before tuning, which shows nothing there.

        A large program is recorded, clustered and lowered in one step each, so that the budget is left for tuning its
        regions. Recording comes first: where the host launches hundreds of operators, times say more about the host.
        """
        if is_large(observation.program):
            return (
                self._algebra(observation)
                or self._promising(observation)
                or self._launch(observation)
                or self._at_once(observation)
                or self._by_share(observation)
                or self._whole(observation)
                or next(a for a in observation.actions if a.kind == "stop")
            )
        return (
            self._algebra(observation)
            or self._promising(observation)
            or self._fusion(observation)
            or self._lowering(observation, library=False)
            or self._late_fusion(observation)
            or self._lowering(observation, library=True)
            or (self._launch(observation) if _waits(observation) else None)
            or self._tuning(observation)
            or self._whole(observation)
            or next(a for a in observation.actions if a.kind == "stop")
        )

    def _algebra(self, o: Observation) -> Action | None:
        """Less work, and deep attentions as products, before anything is written for it.

        Layers become one product where it is left to the library; a generated one fuses what follows each of them.
        Channels last is for tensor cores, which convolutions of half types use. These keep their norms: a generated
        kernel computes a norm with its convolution in fp32, and weights that it was folded into are rounded again.
        """
        tried, library = tried_before(o), library_first(o, o.program.called)
        halves = convolves_halves(o.program)
        left_out = {"together": not library, "channels-last": not halves, "fold": halves}
        found = [a for a in o.actions if a.kind == "algebra" and a not in tried]
        return next((a for a in found if not left_out.get(a.param, False)), None)

    def _promising(self, o: Observation) -> Action | None:
        """What its kind calls promising (`qimeng.actions.Kind.promising`), the longest region first, each once."""
        tried, known = tried_before(o), kinds()
        found = [a for a in o.actions if a.regions and a not in tried and _says_promising(known.get(a.kind), a, o)]
        return next(iter(by_time(o, found)), None)

    def _whole(self, o: Observation) -> Action | None:
        """What is about the program as a whole, once each and last: one launch for many kernels, TorchInductor's code.

        The best program is kept apart, so nothing is lost. Estimates do not tell the difference.
        """
        if (launch := self._launch(o)) is not None or not _measured(o):
            return launch
        tried, called = tried_before(o), o.program.called
        streams = Action("launch", (), "streams")  # where launches are what a call waits for, branches may share it
        if o.program.launch and streams in o.actions and streams not in tried:
            return streams
        whole = Action("library", (called[0].id,) if len(called) == 1 else (), "inductor")
        compiled = any(a.kind == "library" and a.param == whole.param for a in tried)
        return whole if whole in o.actions and not compiled else None

    def _launch(self, o: Observation) -> Action | None:
        """One launch for many kernels, and one by one again where that turned out clearly slower."""
        if not _measured(o):
            return None
        tried = tried_before(o)
        record, back = Action("launch", (), "cuda-graph"), Action("launch", (), "one-by-one")
        if record in o.actions and record not in tried and (len(o.program.called) >= MANY or _waits(o)):
            return record
        ms, last = o.evaluation.ms if o.evaluation else None, o.history[-1].action if o.history else None
        slower = ms is not None and o.best_ms is not None and ms > STEADY * o.best_ms
        return back if slower and last == record and back in o.actions else None

    def _fusion(self, o: Observation) -> Action | None:
        """A fusion that keeps data in registers; products that the library is fast at are left to it at first."""
        if _hurry(o):
            return None
        for action in _fusions(o):
            regions = [o.program.region(r) for r in action.regions]
            products = any(has_product(r) for r in regions) and library_first(o, regions)
            if products and not _spares_memory(o, action):
                continue
            return action
        return None

    def _lowering(self, o: Observation, library: bool) -> Action | None:
        """Products first, unless they take hardly any of the time, then by time.

        Those that the library is fast at only where `library` says so.
        """
        tried, times = tried_before(o), o.evaluation.region_ms if o.evaluation else {}
        least = SMALL_SHARE * sum(times.values())
        waiting = {a: o.program.region(a.regions[0]) for a in o.actions if a.kind == "lowering" and a not in tried}
        chosen = [a for a, r in waiting.items() if library or not (has_product(r) and library_first(o, [r]))]
        products = [a for a in chosen if has_product(r := waiting[a]) and times.get(r.id, least) >= least]
        return next(iter(by_time(o, products or chosen)), None)

    def _late_fusion(self, o: Observation) -> Action | None:
        return None if _hurry(o) else next(iter(_fusions(o)), None)

    def _at_once(self, o: Observation) -> Action | None:
        """All over a large program: clusters, then kernels for all that a family covers."""
        once = Action("cluster"), Action("lower_all")
        return next((a for a in once if a in o.actions and (a.kind == "cluster" or a not in tried_before(o))), None)

    def _by_share(self, o: Observation) -> Action | None:
        """Lower or tune the regions whose share of the time is largest for each attempt so far; equal ones are one.

        So the slowest regions get most attempts, and none gets all (d'Hondt's rule).
        """
        tried, offered = tried_before(o), set(o.actions)
        times = o.evaluation.region_ms if o.evaluation else {}
        shares: dict[str, float] = {}
        for region in o.program.called:
            shares[region.signature] = shares.get(region.signature, 0.0) + times.get(region.id, 0.0)
        total = sum(shares.values()) or 1.0
        attempts = Counter(r for s in o.history for r in s.action.regions)

        def weight(region: Region) -> float:
            return shares[region.signature] / (1 + attempts[region.id])

        for region in sorted(unlike(o.program), key=weight, reverse=True):
            ms, share = times.get(region.id, 0.0), shares[region.signature] / total
            if times and (share < SMALL_SHARE_OF_MANY or ms < LEAST_MS) or at_roofline(region, ms, o):
                continue
            back, on_torch = Action("library", (region.id,)), torch_ms(region, o)
            if back in offered and on_torch is not None and ms > HOPELESS * on_torch:
                return back
            ways = () if self._stuck(region, o) else (("lowering", ""), *intents_in_order(region, ms, o))
            found = (Action(kind, (region.id,), param) for kind, param in ways)
            if (action := next((a for a in found if a in offered and a not in tried), None)) is not None:
                return action
            if back in offered and on_torch is not None and ms > SLOWER * on_torch:
                return back
        return None

    def _tuning(self, o: Observation) -> Action | None:
        tried = tried_before(o)
        offered = set(o.actions)
        times = o.evaluation.region_ms if o.evaluation else {}
        total = sum(times.values()) or 1.0
        regions = sorted(o.program.regions, key=lambda r: -times.get(r.id, 0.0))
        for region in regions:
            ms = times.get(region.id, 0.0)
            if times and ms / total < SMALL_SHARE:
                break
            if at_roofline(region, ms, o):
                continue
            back = next((a for kind in ("library", "unfuse") if (a := Action(kind, (region.id,))) in offered), None)
            on_torch = torch_ms(region, o)
            if back is not None and on_torch is not None and ms > HOPELESS * on_torch:
                return back
            intents = () if self._stuck(region, o) else intents_in_order(region, ms, o)
            for kind, param in intents:
                action = Action(kind, (region.id,), param)
                if action in offered and action not in tried:
                    return action
            if back is not None and on_torch is not None and ms > SLOWER * on_torch:
                return back
        return None

    def _stuck(self, region: Region, o: Observation) -> bool:
        """True after `patience` attempts on the region that brought nothing."""
        best, idle = float("inf"), 0
        for step in o.history:
            if region.id not in step.action.regions or step.evaluation is None:
                continue
            ms = step.evaluation.ms if step.accepted and step.evaluation.ms is not None else float("inf")
            idle = 0 if ms < 0.98 * best else idle + 1
            best = min(best, ms)
        return idle >= self.patience


def _fusions(o: Observation) -> list[Action]:
    """Fusions without recomputing that were not tried; those that compute before a product come last.

    What follows a product is computed once for each element of its result, what comes before it for each tile that
    reads it.
    """
    tried = tried_before(o)

    def before_product(action: Action) -> bool:
        first, second = (o.program.region(r) for r in action.regions)
        return has_product(second) and not has_product(first)

    found = [a for a in o.actions if a.kind == "fusion" and not a.param and a not in tried]
    return sorted(found, key=before_product)


def _says_promising(kind: Kind | None, action: Action, o: Observation) -> bool:
    try:
        return kind is not None and kind.promising(o.program, action, o.device)
    except (KindFault, IllegalAction):
        return False


def _waits(o: Observation) -> bool:
    """Whether the present program takes much longer than its regions together (`WAITS`)."""
    times = o.evaluation.region_ms if o.evaluation else {}
    ms, total = o.evaluation.ms if o.evaluation else None, sum(times.get(r.id, 0.0) for r in o.program.called)
    return ms is not None and total > 0 and all(r.id in times for r in o.program.called) and ms > WAITS * total


def _measured(o: Observation) -> bool:
    """Whether the present program was timed, not estimated."""
    timing = o.evaluation.timing if o.evaluation else None
    return timing is not None and not timing.estimated


def _hurry(o: Observation) -> bool:
    """Whether lowering takes all the steps left (0: not known); equal regions are lowered in one step."""
    tried = tried_before(o)
    waiting = [o.program.region(a.regions[0]) for a in o.actions if a.kind == "lowering" and a not in tried]
    return 0 < o.steps_left <= len({r.signature for r in waiting})


def _spares_memory(o: Observation, action: Action) -> bool:
    """Whether the fused region is of a family that keeps large values from memory, as an attention its scores."""
    try:
        return covering(o.program.fusions.merged(*action.regions))[0].spares
    except (Unsupported, QimengError):
        return False


__all__ = ["HeuristicPlanner"]
