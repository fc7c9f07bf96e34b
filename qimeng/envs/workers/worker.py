"""The process in which candidates run.

Deals in one specification and the candidates for it: it makes inputs from seeds that it receives one at a time, calls,
times, and hands over the outputs. It knows no reference values and gives no verdict; the judge does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree

from qimeng.backend.load import implementation_source, load_kernels
from qimeng.envs.sandbox import close_sockets, entered_here
from qimeng.envs.workers import outputs
from qimeng.envs.workers.call_batch import Batch
from qimeng.envs.workers.channel import Channel
from qimeng.envs.workers.kept_output import Witness
from qimeng.envs.workers.kernel_launches import launches_of
from qimeng.envs.workers.modes import set_mode
from qimeng.envs.workers.poison import fenced, perturb_malloc, poison
from qimeng.envs.workers.preload import adopt_warm
from qimeng.envs.workers.prepared_buffers import PreparedBuffers
from qimeng.envs.workers.regions import inputs_of_region, one_by_one, time_regions
from qimeng.envs.workers.service import Answer, Refused, serve
from qimeng.envs.workers.shared_buffers import Layout
from qimeng.envs.workers.stopwatch import Effort, Samples, Stopwatch
from qimeng.envs.workers.tamper_check import Seal, shadowed, unlike
from qimeng.envs.workers.tensor_bits import checksum, same, weighted_sum
from qimeng.envs.workers.tensor_transfer import hand_over
from qimeng.program.program import Implementation
from qimeng.spec import KernelSpec, perturb_parameters
from qimeng.spec.seeding import seed_generators

IDLE_BYTES = 1 << 30
"""What a worker that waits for the next program may keep of the device's memory beside parameters."""


@dataclass(frozen=True)
class Setup:
    """The settings of a worker, sent before it starts.

    Attributes:
        spec: the specification's bytes.
        mode: precision mode.
        device: PyTorch's name of the device.
        compiled: folder in which each implementation was compiled into one of its own, named by its digest; empty where
            all were compiled into this process's own cache.
    """

    spec: bytes
    mode: str
    device: str
    compiled: str = ""


@dataclass(frozen=True)
class Draw:
    """The seeds of inputs and parameters.

    Attributes:
        seed: of the inputs.
        distribution: of the inputs.
        parameter_seed: of the change to the parameters; None leaves them as the spec makes them.
    """

    seed: int
    distribution: str = "given"
    parameter_seed: int | None = None


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


def open_device(device: torch.device) -> None:
    """Make the device ready, so that none of that is part of a measurement: on a GPU, a context and cuBLAS.

    Memory is mapped in small pages that stay mapped (PyTorch's expandable segments). Large blocks of `cudaMalloc` come
    fast or 11 % slower to stream through, by what was freed before (measured on an H200): that would be luck, not a
    property of the program.
    """
    if device.type == "cuda":
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        torch.cuda.set_device(device)
        x = torch.ones(16, 16, device=device)
        torch.mm(x, x)
        torch.cuda.synchronize()
    else:
        torch.set_num_threads(1)  # several processes share the cores, and OpenMP's threads spin
        perturb_malloc()


class Parameters:
    """The reference module's parameters and buffers, as the spec makes them or changed by a seed."""

    def __init__(self, spec: KernelSpec, device: torch.device):
        self.module = spec.module(str(device))
        self._base = {k: v.clone() for k, v in self.module.state_dict().items()}

    def set(self, seed: int | None) -> dict[str, torch.Tensor]:
        """The state after `load`ing the base and changing it by `seed`; the module's own tensors."""
        state = self.module.state_dict()
        for key, value in self._base.items():
            state[key].copy_(value)
        if seed is not None:
            perturb_parameters(self.module, seed)
        return self.module.state_dict()


class Worker:
    """Answers the judge's commands; see each one."""

    def __init__(self, spec: KernelSpec, device: torch.device, compiled: str = ""):
        self.spec, self.device, self.compiled = spec, device, compiled
        self.stopwatch = Stopwatch(device)
        self._stopwatch_before = dict(vars(self.stopwatch))
        self.seal = Seal()
        self.reused: tuple[Any, ...] = ()
        self.parameters = Parameters(spec, device)
        self.module: ModuleType | None = None
        self.model: torch.nn.Module = self.parameters.module
        self.kept: dict[int, list[torch.Tensor]] = {}
        self.witness = Witness()
        self.batch: Batch | None = None
        self.arguments: tuple[Any, ...] = ()
        self.sums: list[int] = []
        self.alternatives: dict[str, ModuleType] = {}

    def ready(self) -> dict[str, Any]:
        """The process is up: its id, and the layers of the sandbox that it is in; foreign code has not run yet."""
        return {"pid": os.getpid(), "sandbox": list(entered_here().entered)}

    def load(self, source: str, digests: Sequence[str] = ()) -> None:
        """Make the program's model with the reference's parameters; an empty source means the reference itself.

        Args:
            source: the program's text.
            digests: of its generated implementations.
        """
        self._find_compiled(digests)
        self.kept.clear()
        self.witness = Witness()
        self.module, self.model = None, torch.nn.Module()
        state = self.parameters.set(None)
        if not source:
            self.model = self.parameters.module
            return
        self.module = load_kernels(source, os.getcwd())
        with torch.device(self.device):
            self.model = self.module.Model()
        self._check_seal()
        self.model.to(self.device)
        for held in (*self.model.parameters(), *self.model.buffers()):
            held.data = fenced(held.data)
        self.model.load_state_dict({key: state[key] for key in self.model.state_dict()})

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
        inputs = self._inputs(draw)
        inputs = _put_into(self.reused, inputs) if in_place and self.reused else self._fenced(inputs)
        self.reused = inputs if self.stopwatch.has_room(inputs) else ()
        sums = [] if copies else [weighted_sum(x, draw.seed) for x in _tensors(inputs)]
        prepared = PreparedBuffers(self._prepared(), draw.seed)
        poison(self.device, expected_bytes)
        seed_generators(draw.seed)
        began = time.perf_counter()
        output = self.model(*inputs)
        self.stopwatch.synchronize()
        seconds = time.perf_counter() - began
        self._check_seal()
        held = {f"input {i}": x for i, x in enumerate(_tensors(inputs))}
        held |= {f"parameter {k}": v for k, v in self.model.state_dict().items()}
        facts, tensors = outputs.describe(output, held)
        if copies:
            pairs = zip(_tensors(inputs), _tensors(self._inputs(draw)), strict=True)
            changed = [f"input {i}" for i, (x, y) in enumerate(pairs) if not same(x, y)]
        else:
            after = [weighted_sum(x, draw.seed) for x in _tensors(inputs)]
            changed = [f"input {i}" for i, total in enumerate(after) if total != sums[i]]
        if self.model is not self.parameters.module:
            now = self.model.state_dict()
            changed += [f"parameter {k}" for k in now if k not in mutated and not same(now[k], state[k])]
        changed += prepared.changed()
        buffers = [self.model.state_dict()[k].clone() for k in mutated]
        self.kept[number] = [*tensors, *buffers]
        handed, files = hand_over(self.kept[number])
        data = {"facts": outputs.facts_to_json(facts), "tensors": handed, "changed": changed, "seconds": seconds}
        return Answer(data, tuple(files))

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
            samples = self.stopwatch.measure(self.model, fresh, seed, effort, self.witness)
        finally:
            self._check_seal()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return _samples(samples)

    def timed(self) -> Answer:
        """Hand over the output of a timed call since `load`, and say which it is."""
        kept = self.witness.kept
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
        inputs = self._inputs(Draw(seed))
        rounds = []
        if self.module is not None and self.device.type == "cuda":
            for _ in range(repeats + 1):
                rounds.append(
                    time_regions(self.module, lambda: one_by_one(self.model, inputs), entries, self._fill_queue)
                )
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
        self.model(*inputs)
        self._set_parameters(draw.parameter_seed)  # buffers that a call updates, as they were
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

    # -- one region alone

    def capture(self, source: str, draw: Draw, entries: Sequence[str], number: int) -> None:
        """Keep the inputs that region `number` of a program on PyTorch gets, for the alternatives."""
        self.load(source)
        assert self.module is not None
        self._set_parameters(draw.parameter_seed)
        seed_generators(draw.seed)
        self.arguments = self._fenced(
            tuple(inputs_of_region(self.module, self.model, self._inputs(draw), entries, number))
        )
        self.module, self.model = None, torch.nn.Module()
        self.sums = [checksum(x) for x in _tensors(self.arguments)]
        self._collect()

    def alternative(self, number: int, implementation: Implementation, expected_bytes: Sequence[int]) -> Answer:
        """Call one implementation of the region and hand its outputs over; kept until `release`."""
        call = self._alternative(implementation)
        poison(self.device, expected_bytes)
        output = call(*self.arguments)
        self.stopwatch.synchronize()
        self._check_seal()
        self._check_arguments()
        facts, tensors = outputs.describe(output, {f"input {i}": x for i, x in enumerate(_tensors(self.arguments))})
        self.kept[number] = tensors
        handed, files = hand_over(tensors)
        return Answer({"facts": outputs.facts_to_json(facts), "tensors": handed}, tuple(files))

    def warm_alternative(self, implementation: Implementation) -> None:
        """Load one implementation and call it once, so that timing it later takes no longer than it must."""
        self._alternative(implementation)(*self.arguments)
        self.stopwatch.synchronize()
        self._check_seal()
        self._check_arguments()

    def time_alternative(self, implementation: Implementation, effort: Effort) -> dict[str, Any]:
        """Times of one implementation on the region's inputs; what it prepared is given up again."""
        call = self._alternative(implementation)
        samples = self.stopwatch.measure(call, lambda _: self.arguments, 0, effort)
        self._check_seal()
        self._check_arguments()
        return _samples(samples)

    def forget_region(self) -> None:
        """Give up the region's inputs and implementations."""
        self.alternatives.clear()
        self.arguments, self.sums = (), []
        self.release()

    def rest(self) -> None:
        """Give up program and region, for the next ones, and their memory where it is much."""
        self.load("")
        self.forget_region()
        self.release(tidy=self.device.type == "cuda" and torch.cuda.memory_reserved(self.device) > IDLE_BYTES)

    # -- parts

    def _alternative(self, implementation: Implementation) -> Callable[..., Any]:
        """The function of an implementation of the region, with its prepared buffers."""
        module = self.alternatives.get(implementation.digest)
        if module is None:
            self._find_compiled([implementation.digest])
            module = load_kernels(implementation_source(implementation), os.getcwd())
            self.alternatives[implementation.digest] = module
        function, prepared = getattr(module, implementation.entry), ()
        if implementation.prepare:
            chosen = [self.arguments[i] for i in implementation.prepare_inputs]
            prepared = tuple(getattr(module, implementation.prepare)(*chosen))
        return lambda *arguments: function(*arguments, *prepared)

    def _check_arguments(self) -> None:
        if [checksum(x) for x in _tensors(self.arguments)] != self.sums:
            raise Refused("mutated", "the region's function changed its inputs in place")

    def _find_compiled(self, digests: Sequence[str]) -> None:
        if self.compiled:
            from qimeng.envs.workers.compiled_cache import read_compiled  # loads Triton

            read_compiled([os.path.join(self.compiled, digest) for digest in digests])

    def _inputs(self, draw: Draw) -> tuple[Any, ...]:
        return self.spec.inputs(draw.seed, str(self.device), draw.distribution)

    def _fenced(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """`inputs` with a fence around each, where there is memory for a copy."""
        if not self.stopwatch.has_room(inputs):
            return inputs
        leaves, tree = _pytree.tree_flatten(inputs)
        return tuple(_pytree.tree_unflatten([fenced(x) if isinstance(x, torch.Tensor) else x for x in leaves], tree))

    def _set_parameters(self, seed: int | None) -> Mapping[str, torch.Tensor]:
        state = self.parameters.set(seed)
        if self.model is not self.parameters.module:
            self.model.load_state_dict({key: state[key] for key in self.model.state_dict()})
        return state

    def _prepared(self) -> Sequence[Any]:
        """The program's prepared buffers (see the runtime part of an emitted program)."""
        return getattr(self.model, "_qimeng_prepared", ())

    def _unprepared(self, *inputs: Any) -> Any:
        for p in self._prepared():
            p.stamp = None
        return self.model(*inputs)

    def _fill_queue(self) -> None:
        """Keep the GPU busy for a while, so that the calls that follow are queued before they run."""
        self.stopwatch.flush()
        torch.cuda._sleep(2_000_000)

    def _check_seal(self) -> None:
        broken = self.seal.broken() + [
            name for it in (self, self.stopwatch, self.parameters, self.witness) for name in shadowed(it)
        ]
        broken += unlike(self.stopwatch, self._stopwatch_before)
        if broken:
            raise _tampered(broken)

    def _collect(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()


COMMANDS = (
    "ready", "load", "trial", "again", "foreign", "release", "arm", "fire", "queue", "finish", "time", "timed", "peak",
    "profile", "launches", "capture", "alternative", "warm_alternative", "time_alternative", "forget_region", "warm",
    "rest",
)  # fmt: skip


GUARDED = ("load", "trial", "time")
"""Those after which the seal is looked at by who cannot be replaced; none that the judge's clock times."""


def _guarded(command: Callable[..., Any], broken: Callable[[], list[str]]) -> Callable[..., Any]:
    """`command`, then a look at the seal (`Seal.apart`): `Worker._check_seal` is a name that can be replaced."""

    def run(**arguments: Any) -> Any:
        result = command(**arguments)
        if names := broken():
            raise _tampered(names)
        return result

    return run


def _tampered(names: Sequence[str]) -> Refused:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return Refused("tampered", f"the candidate changed {', '.join(names[:5])}{more}")


def foreign_inputs(leaves: Sequence[Any], placed: bool) -> Iterator[tuple[str, list[Any]]]:
    """In words, and as leaves: inputs whose first tensor has another shape, stride, dtype or device.

    Args:
        leaves: the inputs that the program was made for.
        placed: whether parameters or buffers say which device it is on; without them, any device is right.
    """
    number = next((i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.numel() > 1), None)
    if number is None:
        return
    x = leaves[number]
    dim = next(d for d, size in enumerate(x.shape) if size > 1)
    spread = [2 * max(s, 1) for s in x.stride()]
    other = torch.float64 if x.dtype is not torch.float64 else torch.float32
    for what, y in (
        ("a shorter tensor", x.narrow(dim, 0, x.shape[dim] - 1)),
        ("one dimension more", x.unsqueeze(0)),
        ("other strides", torch.empty_strided(x.shape, spread, dtype=x.dtype, device="meta")),
        ("another dtype", torch.empty_strided(x.shape, x.stride(), dtype=other, device="meta")),
        ("another device", torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if placed else None),
    ):
        if y is None:
            continue
        yield what, [*leaves[:number], y, *leaves[number + 1 :]]


def _put_into(old: tuple[Any, ...], new: tuple[Any, ...]) -> tuple[Any, ...]:
    """`new` with the content of its tensors in those of `old`, as far as they can hold it."""
    before, (leaves, tree) = _pytree.tree_leaves(list(old)), _pytree.tree_flatten(new)
    for i, (x, y) in enumerate(zip(before, leaves, strict=True)):
        fits = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.shape == y.shape and x.dtype is y.dtype
        if fits and x.stride() == y.stride() and x.is_contiguous():
            leaves[i] = x.copy_(y)
    return tuple(_pytree.tree_unflatten(leaves, tree))


def _samples(samples: Samples) -> dict[str, Any]:
    return {"device_ms": samples.device_ms, "wall_ms": samples.wall_ms}


def _tensors(tree: Any) -> list[torch.Tensor]:
    return _leaves(list(tree))


def _leaves(tree: Any) -> list[torch.Tensor]:
    return [x for x in _pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


__all__ = ["Draw", "Parameters", "Setup", "Worker", "main", "open_device", "poison"]
