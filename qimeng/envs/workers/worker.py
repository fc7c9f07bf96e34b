"""The process in which candidates run.

Deals in one specification and the candidates for it: it makes inputs from seeds that it receives one at a time, calls,
times (`qimeng.envs.workers.timed_program`), and hands over the outputs. It knows no reference values and gives no
verdict; the judge does.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.utils import _pytree

from qimeng.envs.sandbox import close_sockets, entered_here
from qimeng.envs.workers import inductor_files, outputs, small_tensors
from qimeng.envs.workers.channel import Channel
from qimeng.envs.workers.loaded_program import tampered
from qimeng.envs.workers.poison import poison
from qimeng.envs.workers.preload import adopt_warm
from qimeng.envs.workers.prepared_buffers import PreparedBuffers
from qimeng.envs.workers.regions import inputs_of_region
from qimeng.envs.workers.service import Answer, serve
from qimeng.envs.workers.stopwatch import Effort
from qimeng.envs.workers.tensor_bits import same, weighted_sum
from qimeng.envs.workers.tensor_transfer import hand_over
from qimeng.envs.workers.timed_program import TimedProgram, samples_to_json
from qimeng.envs.workers.worker_inputs import apart, foreign_inputs, put_into, tensors_of
from qimeng.envs.workers.worker_setup import Draw, Setup, open_device
from qimeng.program.program import Implementation
from qimeng.spec import KernelSpec
from qimeng.spec.modes import set_mode
from qimeng.spec.seeding import seed_generators

IDLE_BYTES = 1 << 30
"""What a worker that waits for the next program may keep of the device's memory beside parameters."""


def main(channel: Channel, setup: Setup) -> None:
    """Open the device, then answer the judge."""
    set_mode(setup.mode)
    adopt_warm()
    device = torch.device(setup.device)
    open_device(device)
    close_sockets()
    worker = Worker(KernelSpec.from_bytes(setup.spec), device, setup.compiled)
    worker.stopwatch.synchronize()
    with torch.no_grad():
        commands = {name: getattr(worker, name) for name in COMMANDS}
        broken = worker.seal.apart()
        serve(channel, commands | {name: _guarded(commands[name], broken) for name in GUARDED})


class Worker(TimedProgram):
    """Answers the judge's commands; see each one."""

    def ready(self) -> dict[str, Any]:
        """The process is up: its id, and the layers of the sandbox that it is in; foreign code has not run yet."""
        return {"pid": os.getpid(), "sandbox": list(entered_here().entered)}

    def trial(
        self,
        number: int,
        draw: Draw,
        mutated: Sequence[str],
        expected_bytes: Sequence[int],
        in_place: bool = False,
        copies: bool = True,
    ) -> Answer:
        """Call the model once and hand over its outputs, then the buffers `mutated`.

        The outputs are kept, under `number`, until `release`.

        Args:
            number: of the trial.
            draw: inputs and parameters.
            mutated: buffers that the call updates.
            expected_bytes: of each output.
            in_place: whether the inputs take the place of those of the trial before, in the same tensors.
            copies: whether inputs are compared with others of the same draw after the call, or else with sums over
                their bits, which take no memory.
        """
        state = self._set_parameters(draw.parameter_seed)
        drawn = self._inputs(draw)
        inputs = put_into(self.reused, drawn) if in_place and self.reused else self._fenced(drawn)
        self.reused = inputs if self.stopwatch.has_room(inputs) else ()
        sums = [] if copies else [weighted_sum(x, draw.seed) for x in tensors_of(inputs)]
        before = tensors_of(drawn) if copies and apart(drawn, inputs) else []
        del drawn  # where memory is tight, they are drawn again
        prepared = PreparedBuffers(self._prepared(), draw.seed)
        poison(self.device, expected_bytes)
        seed_generators(draw.seed)
        began = time.perf_counter()
        output = self.model(*inputs)
        self.stopwatch.synchronize()
        seconds = time.perf_counter() - began
        self._check_seal()
        held = {f"input {i}": x for i, x in enumerate(tensors_of(inputs))}
        held |= {f"parameter {k}": v for k, v in self.model.state_dict().items()}
        facts, tensors = outputs.describe(output, held)
        if copies:
            pairs = zip(tensors_of(inputs), before or tensors_of(self._inputs(draw)), strict=True)
            changed = [f"input {i}" for i, (x, y) in enumerate(pairs) if not same(x, y)]
        else:
            after = [weighted_sum(x, draw.seed) for x in tensors_of(inputs)]
            changed = [f"input {i}" for i, total in enumerate(after) if total != sums[i]]
        if self.model is not self.parameters.module:
            now = self.model.state_dict()
            kept = [k for k in now if k not in mutated]
            unlike = small_tensors.differing([now[k] for k in kept], [state[k] for k in kept])
            changed += [f"parameter {kept[i]}" for i in unlike]
        changed += prepared.changed()
        now = self.model.state_dict()  # made anew each time that it is asked for: once, not once a buffer
        buffers = small_tensors.copies([now[k] for k in mutated])
        self.kept[number] = [*tensors, *buffers]
        handed, files = hand_over(self.kept[number])
        data = {"facts": outputs.facts_to_json(facts), "tensors": handed, "changed": changed, "seconds": seconds}
        return Answer(data, tuple(files))

    def take_over(self, files: Sequence[str]) -> None:
        """Have what torch.compile compiled ahead; nothing foreign has run."""
        inductor_files.take_over(files)

    def warm(self, seed: int) -> None:
        """Call the model once, so that what it compiles at its first call is compiled."""
        self._set_parameters(None)
        self.model(*self._fenced(self._inputs(Draw(seed))))
        self.stopwatch.synchronize()
        self._check_seal()

    def foreign(self, seed: int) -> list[str]:
        """Which inputs the program takes although it was not made for them: those that raise no ValueError."""
        inputs = self._inputs(Draw(seed))
        leaves, tree = _pytree.tree_flatten(inputs)
        accepted = []
        for what, changed in foreign_inputs(leaves, placed=bool(self.model.state_dict())):
            try:
                self.model(*_pytree.tree_unflatten(changed, tree))
            except ValueError:
                continue
            except Exception as error:  # noqa: BLE001  it ran, and failed in whatever way
                what += f" ({type(error).__name__})"
            accepted.append(what)
        return accepted

    def again(self, number: int) -> Answer:
        """Hand over the kept outputs of a trial once more."""
        handed, files = hand_over(self.kept[number])
        return Answer({"tensors": handed}, tuple(files))

    def release(self, keep: Sequence[int] = (), tidy: bool = False) -> None:
        """Give up the kept outputs, those of the trials `keep` excepted.

        Args:
            keep: numbers of trials.
            tidy: whether memory goes back to the device, for others.
        """
        self.kept = {number: tensors for number, tensors in self.kept.items() if number in keep}
        self.batch = None
        if not keep:
            self.reused = ()
        self._collect()
        if tidy and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def capture(self, source: str, draw: Draw, entries: Sequence[str], number: int) -> None:
        """Keep the inputs that region `number` of a program on PyTorch gets, for the alternatives.

        Parameters stay such: what torch.compile made for them is not found for other tensors.
        """
        self.load(source)
        assert self.module is not None
        self._set_parameters(draw.parameter_seed)
        seed_generators(draw.seed)
        given = inputs_of_region(self.module, self.model, self._inputs(draw), entries, number)
        pairs = zip(self._fenced(given), given, strict=True)
        self.region.take(tuple(Parameter(x, requires_grad=False) if isinstance(y, Parameter) else x for x, y in pairs))
        self.module, self.model = None, torch.nn.Module()
        self._collect()

    def alternative(self, number: int, implementation: Implementation, expected_bytes: Sequence[int]) -> Answer:
        """Call one implementation of the region and hand its outputs over; kept until `release`."""
        function = self._alternative(implementation)
        poison(self.device, expected_bytes)
        output = function(*self.region.arguments)
        self._check_region()
        facts, tensors = self.region.described(output)
        self.kept[number] = tensors
        handed, files = hand_over(tensors)
        return Answer({"facts": outputs.facts_to_json(facts), "tensors": handed}, tuple(files))

    def warm_alternative(self, implementation: Implementation) -> None:
        """Load one implementation and call it once, so that timing it later takes no longer than it must."""
        self._alternative(implementation)(*self.region.arguments)
        self._check_region()

    def time_alternative(self, implementation: Implementation, effort: Effort) -> dict[str, Any]:
        """Times of one implementation on the region's inputs; what it prepared is given up again."""
        function = self._alternative(implementation)
        samples = self.stopwatch.measure(function, lambda _: self.region.arguments, 0, effort)
        self._check_region()
        return samples_to_json(samples)

    def forget_region(self) -> None:
        """Give up the region's inputs and implementations."""
        self.region.forget()
        self.release()

    def _alternative(self, implementation: Implementation) -> Callable[..., Any]:
        """The function of an implementation of the region."""
        if not self.region.has(implementation):
            self._find_compiled([implementation.digest])
            self.region.load(implementation)
        return self.region.function(implementation)

    def _check_region(self) -> None:
        self.stopwatch.synchronize()
        self._check_seal()
        self.region.check()

    def rest(self) -> None:
        """Give up program and region, for the next ones, and their memory where it is much."""
        self.load("")
        self.forget_region()
        gc.collect()  # programs that refer to themselves: a measurement has no time for it
        self.release(tidy=self.device.type == "cuda" and torch.cuda.memory_reserved(self.device) > IDLE_BYTES)


COMMANDS = (
    "ready", "load", "trial", "again", "foreign", "release", "arm", "fire", "queue", "finish", "time", "timed", "peak",
    "profile", "launches", "capture", "alternative", "warm_alternative", "time_alternative", "forget_region", "warm",
    "rest", "take_over",
)  # fmt: skip


GUARDED = ("load", "trial", "time")
"""Commands after which a copy of the seal is checked that candidates cannot replace; the judge's clock times none."""


def _guarded(command: Callable[..., Any], broken: Callable[[], list[str]]) -> Callable[..., Any]:
    """`command`, then a look at the seal (`Seal.apart`): `Worker._check_seal` is a name that can be replaced."""

    def run(**arguments: Any) -> Any:
        result = command(**arguments)
        if names := broken():
            raise tampered(names)
        return result

    return run


__all__ = ["Worker", "main"]
