"""Timing the program that a worker has loaded: by events, in batches under the judge's clock, and by the profiler.

Deals in calls and their times. Gives no verdict on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from qimeng.envs.workers import outputs
from qimeng.envs.workers.call_batch import Batch
from qimeng.envs.workers.kernel_launches import launches_of
from qimeng.envs.workers.loaded_program import LoadedProgram
from qimeng.envs.workers.regions import one_by_one, time_regions
from qimeng.envs.workers.service import Answer
from qimeng.envs.workers.shared_buffers import Layout
from qimeng.envs.workers.stopwatch import Effort, Samples
from qimeng.envs.workers.tensor_bits import same
from qimeng.envs.workers.tensor_transfer import hand_over
from qimeng.envs.workers.worker_setup import Draw
from qimeng.spec.seeding import seed_generators

CYCLES_A_MS = 2_000_000
"""Cycles of a millisecond, at a clock that no GPU exceeds by far."""

QUEUE_MS, HOST_SHARE, MOST_QUEUE_MS = 1.0, 1.5, 100.0
"""Milliseconds of work before a profiled run: at least, more for each that the host took to launch it, and at most."""


class TimedProgram(LoadedProgram):
    """The commands of a worker that time and profile the program that is loaded; see each one."""

    def arm(self, warm_up: Draw, layout: Layout, mutated: Sequence[str] = ()) -> Answer:
        """Make memory for a batch of calls and hand it over.

        Args:
            warm_up: inputs of calls beforehand, and the parameters of all calls.
            layout: where the judge puts inputs and finds outputs.
            mutated: buffers that a call updates.
        """
        self._set_parameters(warm_up.parameter_seed)
        state = self.model.state_dict()
        self.batch = Batch(self.device, self.model, lambda: self._inputs(warm_up), layout, state, mutated)
        self.batch.first = None
        self.stopwatch.synchronize()
        return self.batch.answer

    def fire(self, seeds: Sequence[int] = (), others: Sequence[Sequence[tuple[int, Any]]] = ()) -> list[Any]:
        """Make the calls of the batch, whose inputs are there now; see `Batch.run`."""
        assert self.batch is not None
        facts = self.batch.run(self.model, seeds, others)
        self.stopwatch.synchronize()
        return facts

    def queue(self, value: int) -> list[Any]:
        """Queue the calls of the batch behind the judge's signal; see `Batch.queue`."""
        assert self.batch is not None
        return self.batch.queue(value, self.model)

    def finish(self) -> None:
        """Wait until the device has nothing left to do."""
        self.stopwatch.synchronize()

    def time(
        self, seed: int, effort: Effort, parameter_seed: int | None = None, mutated: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Times of calls on as-given inputs; the output of one is kept for `timed`.

        The memory is released, as the baselines do, so that the next measurement gets the same memory.

        Args:
            seed: of all inputs; see `Stopwatch.measure`.
            effort: how much to measure.
            parameter_seed: of the change to the parameters.
            mutated: buffers that a call updates; every call finds them as they were.
        """
        self._set_parameters(parameter_seed)
        state = self.model.state_dict()
        before = {key: state[key].clone() for key in mutated}

        def fresh(number: int) -> tuple[Any, ...]:
            for key, value in before.items():
                state[key].copy_(value)
            inputs = self._inputs(Draw(number))
            seed_generators(number)
            return inputs

        try:
            samples = self.stopwatch.measure(self.model, fresh, seed, effort, self.sampler)
        finally:
            self._check_seal()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return samples_to_json(samples)

    def timed(self) -> Answer:
        """Hand over the output of a timed call since `load`, and say which it is."""
        kept = self.sampler.sample
        handed, files = hand_over(kept.tensors)
        return Answer({"tensors": handed, "round": kept.round, "call": kept.call}, tuple(files))

    def peak(self, seed: int) -> int | None:
        """Most bytes that a call holds beyond inputs and parameters (prepared buffers count); None on the CPU."""
        if self.device.type != "cuda":
            return None
        inputs = self._inputs(Draw(seed))
        prepared = {b.untyped_storage().data_ptr(): b.nbytes for p in self._prepared() for b in p.buffers}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = self.model(*inputs)
        torch.cuda.synchronize()
        peak = int(torch.cuda.max_memory_allocated()) - before
        del output
        return int(peak + sum(prepared.values()))

    def profile(self, seed: int, entries: Sequence[str], repeats: int) -> dict[str, Any]:
        """Milliseconds of each region, a list for each repeat, and of making prepared buffers anew.

        Regions are not timed on the CPU.
        """
        inputs, ahead_ms = self._inputs(Draw(seed)), QUEUE_MS
        rounds = []
        if self.module is not None and self.device.type == "cuda":
            for _ in range(repeats + 1):
                fill = partial(self._fill_queue, ahead_ms)
                times, host_ms = time_regions(self.module, lambda: one_by_one(self.model, inputs), entries, fill)
                rounds.append(times)
                ahead_ms = min(max(ahead_ms, QUEUE_MS + HOST_SHARE * host_ms), MOST_QUEUE_MS)
        prepared = list(self._prepared())
        prepare_ms = None
        if prepared:
            self.model(*inputs)
            self.stopwatch.synchronize()
            with_all = self.stopwatch.once(self._unprepared, inputs)[0].device
            prepare_ms = max(with_all - self.stopwatch.once(self.model, inputs)[0].device, 0.0)
        return {"regions": rounds[1:], "prepare_ms": prepare_ms}

    def launches(self, draw: Draw) -> Answer:
        """Every kernel of one call, times from the first one's, and what the call returned; no kernels on the CPU.

        It takes seconds the first time.
        """
        self._set_parameters(draw.parameter_seed)
        inputs = self._inputs(draw)
        before = [(b, b.clone()) for b in self.model.buffers()]
        self.model(*inputs)
        for buffer, value in before:  # only those that the call updated: what was prepared from others stays
            if not same(buffer, value):
                buffer.copy_(value)
        made: list[Any] = []
        seed_generators(draw.seed)
        if self.device.type == "cuda":
            found = launches_of(lambda: made.append(self.model(*inputs)))
        else:
            found = []
            made.append(self.model(*inputs))
        first = min((began for _, began, _ in found), default=0.0)
        kernels = [(name, began - first, ended - first) for name, began, ended in found]
        facts, self.kept[0] = outputs.describe(made[0], {})
        handed, files = hand_over(self.kept[0])
        return Answer({"kernels": kernels, "facts": outputs.facts_to_json(facts), "tensors": handed}, tuple(files))

    def _unprepared(self, *inputs: Any) -> Any:
        for p in self._prepared():
            p.stamp = None
        return self.model(*inputs)

    def _fill_queue(self, ms: float) -> None:
        """Keep the GPU busy for so many milliseconds or more, so that calls that follow are queued before they run."""
        self.stopwatch.flush()
        torch.cuda._sleep(round(ms * CYCLES_A_MS))


def samples_to_json(samples: Samples) -> dict[str, Any]:
    """Times as they are handed over."""
    return {"device_ms": samples.device_ms, "wall_ms": samples.wall_ms}


__all__ = ["CYCLES_A_MS", "HOST_SHARE", "MOST_QUEUE_MS", "QUEUE_MS", "TimedProgram", "samples_to_json"]
