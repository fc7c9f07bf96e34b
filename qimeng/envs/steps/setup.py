"""From a specification to a task: capture, device, coder, judge.

Deals in choosing the parts by name and by what this machine has. Knows nothing about steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from qimeng.actions import Context
from qimeng.device import Device, current_card, current_device, device_named, driver_version, target_device
from qimeng.envs.judge.region_judges import MANY_REGIONS
from qimeng.envs.steps.caching import CachingEvaluator
from qimeng.envs.steps.task import Task
from qimeng.envs.workers.model_libraries import library_modules
from qimeng.envs.workers.shared_server import shared_server
from qimeng.errors import CoderError, DeviceError, SpecError
from qimeng.interfaces import Coder, Evaluator
from qimeng.store import Conditions, Store

if TYPE_CHECKING:
    import torch

    from qimeng.envs.judge.library_compilers import LibraryCompilers
    from qimeng.envs.judge.region_spec import RegionSpec
    from qimeng.envs.judge.torch_compile import TorchCompile
    from qimeng.envs.workers.compile import Compilers
    from qimeng.envs.workers.local_pool import LocalPool
    from qimeng.graph.opgraph import OpGraph
    from qimeng.program.program import Program
    from qimeng.spec import KernelSpec


CODERS = {
    "template": "qimeng.coder.template.coder:TemplateCoder",
    "template+cuda": "qimeng.coder.template.coder:with_cuda",
}
"""Name to where the class, or a function that makes the coder, is; each is called without arguments.

Names with a model: `qimeng.coder.named.FORMS`.
"""


def make_coder(coder: str | Coder, **options: Any) -> Coder:
    """The coder called `coder`, or `coder` itself.

    Args:
        coder: one of `CODERS`, a name of the forms in `qimeng.coder.named.FORMS`, or a coder.
        options: of `qimeng.coder.named.coder_named`, for a name with a model.

    Raises:
        ValueError: an unknown name; the message lists the names.
        CoderError: the coder cannot be used here; the message says what is missing.
    """
    from qimeng.coder.named import FORMS, coder_named, is_form

    if not isinstance(coder, str):
        return coder
    if coder in CODERS:
        module, _, name = CODERS[coder].partition(":")
        made: Coder = getattr(import_module(module), name)()
        return made
    if not is_form(coder):
        raise ValueError(f"unknown coder {coder!r}; known: {', '.join((*sorted(CODERS), *FORMS))}")
    return coder_named(coder, **options)


def make_device(device: str | Device | torch.device | None) -> Device:
    """The device to optimize for.

    A name of the table means that device, estimated, unless it is the GPU of this machine; None means the GPU of this
    machine, else the H200, estimated. PyTorch's ``cuda`` is the GPU of this machine.

    Raises:
        DeviceError: an unknown name; or a device of PyTorch's other than the first GPU, or there is no GPU here.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        return target_device()
    name, here = str(device), current_device()
    if name in ("cuda", "cuda:0"):
        if here is None:
            raise DeviceError(f"device {name!r}: there is no GPU here; name the one that is meant, such as 'h100'")
        return here
    kind, _, number = name.partition(":")
    if kind == "cuda" and number.isdigit():
        raise DeviceError(f"device {name!r}: qimeng uses the first GPU that it sees; set CUDA_VISIBLE_DEVICES={number}")
    if not isinstance(device, str) or kind == "cpu":
        raise DeviceError(f"device {name!r}: kernels are made for GPUs; name one (see `qimeng devices`)")
    if here is not None and device.lower() in (here.name, here.name.removesuffix("(here)")):
        return here
    return device_named(device)


def make_task(
    spec: Any,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    coder: str | Coder = "template",
    evaluator: Evaluator | None = None,
    device: str | Device | torch.device | None = None,
    mode: str | None = None,
    store: Store | None = None,
    by_region: bool | None = None,
    compiled: tuple[Sequence[str], float] = ((), 0.0),
) -> Task:
    """Everything a step loop needs to optimize `spec`.

    The judge is `evaluator` where given; else the GPU of this machine; else the analytic model of a named device,
    whose times are estimates. With a store, what was judged before is not judged again.

    Args:
        spec: a `KernelSpec`, or what `KernelSpec.of` makes one from.
        inputs: example inputs, where `spec` is a module or a function.
        kwargs: example inputs that are given by keyword.
        coder: name of a coder, or a coder.
        evaluator: the judge.
        device: name of a device, or a device.
        mode: precision mode: ``"default"``, ``"highest"`` or ``"high"``; the spec's own by default.
        store: where evaluations are kept and looked up.
        by_region: whether patches are judged on their region, and the whole program at milestones; by default on a GPU
            of this machine for programs of `MANY_REGIONS` regions and more. An evaluator that is given has to know
            `Asked.REGION`, or else it judges whole programs all the same. Data to train planners on is collected
            without, so that every time in it is of one kind, except for networks.
        compiled: modes of torch.compile that the final verification will want, and the most seconds for each: on a GPU
            of this machine, they are compiled beside the capture.

    Raises:
        SpecError: the computation cannot be optimized as given, or an unknown mode.
        DeviceError: an unknown device.
        ValueError: an unknown coder or mode of torch.compile.
        CoderError: the coder cannot be used here.
    """
    from qimeng.graph.state import updated_tables
    from qimeng.spec import KernelSpec
    from qimeng.spec.patience import together

    spec = KernelSpec.of(spec, inputs, mode=mode, kwargs=kwargs)
    with ExitStack() as held, together():
        row, reason = make_device(device), ""
        place = "cuda" if row.measured and current_device() is not None else "cpu"  # a cluster's GPU is not here
        spec.check(place)
        ahead: TorchCompile | None = None
        if row.measured and evaluator is None:
            shared_server().prepare(library_modules(spec))  # while the computation is captured here
            if compiled[0] and place == "cuda":
                ahead = _compiled_ahead(spec, *compiled)
                held.callback(ahead.close)
        start, whole, reason = _start(spec, place)
        reference = partial(spec.module, place)
        if tables := updated_tables(start.graph):
            spec, ahead = spec.with_(updated=tables), None
        context = Context(row, make_coder(coder), spec.mode)
        judge = evaluator or make_evaluator(spec, start, context, compiled=ahead)
        if ahead is not None:
            held.pop_all()  # the judge closes it
    if by_region is None:
        by_region = evaluator is None and row.measured and len(start.called) >= MANY_REGIONS
    if by_region and evaluator is None:
        judge = region_judges(judge, spec, context)
    conditions = conditions_of(spec, judge, row)
    if store is not None:
        store.name_anew(spec.digest, start)
        if context.coder.memory is not None:
            context.coder.memory.use_store(store, spec.digest)
        store.put_spec(spec.digest, spec.name)
        judge = CachingEvaluator(judge, store, conditions)
    return Task(
        start,
        context,
        judge,
        conditions,
        spec.name,
        reason,
        reference,
        whole,
        declared=spec.declaration,
        by_region=by_region,
    )


def _start(spec: KernelSpec, place: str) -> tuple[Program, Program | None, str]:
    """The start program, the computation as its author wrote it, and why it could not be captured (or nothing)."""
    from qimeng.envs.steps.capturing import captured
    from qimeng.graph.capture import CaptureError
    from qimeng.program.opaque import opaque_program
    from qimeng.program.program import Program

    written = opaque_program(spec)
    whole = None if spec.weights else written  # what its author wrote has other weights
    try:
        return Program.start(captured(spec, device=place)), whole, ""
    except CaptureError as error:
        if spec.weights:
            raise SpecError(f"weights={spec.weights!r} needs the computation as a graph, and {error}") from error
        return written, whole, f"left on PyTorch as it is: {error}"


def _compiled_ahead(spec: KernelSpec, modes: Sequence[str], limit_s: float) -> TorchCompile:
    from qimeng.envs.judge.gpu_evaluator import begin_compiled
    from qimeng.envs.judge.torch_compile import compile_server

    compile_server().prepare(library_modules(spec))
    return begin_compiled(spec, modes, limit_s)


def make_evaluator(
    spec: KernelSpec,
    start: Program,
    context: Context,
    beside: int = 1,
    compiled: TorchCompile | None = None,
    libraries: LibraryCompilers | None = None,
    compilers: Compilers | None = None,
) -> Evaluator:
    """The GPU of this machine as judge where `context.device` is that one, else the analytic model.

    Args:
        spec: what is computed.
        start: the program that a search begins with.
        context: device, coder and precision mode.
        beside: judges that are open at a time, each with its part of the memory.
        compiled: torch.compile's programs, where some were begun before.
        libraries: those of another judge on this device, shared with it.
        compilers: likewise, of kernels.

    Raises:
        CoderError: the coder has a free hand (a language model), and nothing here keeps what it writes from files.
    """
    from qimeng.envs.sandbox import needs_landlock

    if context.coder.free_hand and (missing := needs_landlock()):
        raise CoderError(missing)
    if context.device.measured:
        from qimeng.envs.judge.gpu_evaluator import GpuEvaluator

        return GpuEvaluator(
            spec,
            start.graph,
            device=context.device,
            beside=beside,
            compiled=compiled,
            libraries=libraries,
            compilers=compilers,
        )
    from qimeng.envs.estimate.estimator import EstimatingEvaluator

    return EstimatingEvaluator(spec, context.device, coder=context.coder)


def region_judges(whole: Evaluator, spec: KernelSpec, context: Context) -> Evaluator:
    """`whole`, the judge of `spec` that `make_evaluator` made, with judges of its regions beside it.

    What was compiled for a region is there for the whole program as well.
    """
    from qimeng.envs.judge.region_judges import OPEN, RegionJudges

    def make(alone: RegionSpec) -> Evaluator:
        libraries, compilers = getattr(whole, "libraries", None), getattr(whole, "compilers", None)
        return make_evaluator(alone.spec, alone.program, context, beside=OPEN, libraries=libraries, compilers=compilers)

    if not context.device.measured:
        return RegionJudges(whole, spec, make, "cpu")
    import torch

    from qimeng.device_lock import DeviceLock, lock_path
    from qimeng.envs.judge.device_turns import DeviceTurns

    return RegionJudges(whole, spec, make, "cuda", DeviceTurns(DeviceLock(lock_path(torch.device("cuda", 0)))))


def make_pool(
    spec: KernelSpec,
    device: str | Device | None = None,
    coder: str = "template",
    environments: Sequence[Mapping[str, str]] = ({}, {}),
) -> LocalPool:
    """Several judges of `spec` behind one boundary, each in a process of its own; the caller closes it.

    Args:
        spec: what is computed.
        device: as for `make_task`.
        coder: name of the coder, as for `make_task`.
        environments: variables of each process, such as ``{"CUDA_VISIBLE_DEVICES": "1"}``; one process for each.
    """
    from qimeng.envs.workers.local_pool import LocalPool

    row = make_device(device)
    return LocalPool(partial(judge_of, spec.to_bytes(), device, coder), evaluator_kind(row), environments)


def judge_of(spec: bytes, device: str | Device | None, coder: str) -> tuple[Evaluator, OpGraph]:
    """In a process of a pool: the judge of a specification (`KernelSpec.to_bytes`), and its graph."""
    from qimeng.spec import KernelSpec

    task = make_task(KernelSpec.from_bytes(spec), device=device, coder=coder)
    return task.evaluator, task.start.graph


def evaluator_kind(device: Device) -> type[Evaluator]:
    """The class of the judge for `device`: see `make_evaluator`."""
    if device.measured:
        from qimeng.envs.judge.gpu_evaluator import GpuEvaluator

        return GpuEvaluator
    from qimeng.envs.estimate.estimator import EstimatingEvaluator

    return EstimatingEvaluator


def conditions_of(spec: KernelSpec, evaluator: Evaluator, device: Device) -> Conditions:
    """What the judge's findings depend on besides the program."""
    estimated = not device.measured if evaluator.estimated is None else evaluator.estimated
    versions = versions_of(evaluator)
    if device.measured and (card := current_card()) is not None:
        versions += (("card", card.name),)
    return Conditions(spec.digest, device.name, spec.mode, estimated, versions)


def versions_of(evaluator: Evaluator) -> tuple[tuple[str, str], ...]:
    """(name, version) of the evaluator, torch, triton and the driver."""
    return versions_here(f"{evaluator.name} {evaluator.version}")


def versions_here(judge: str) -> tuple[tuple[str, str], ...]:
    """The same where the evaluator is called `judge`."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return (("evaluator", judge), ("torch", torch.__version__), ("triton", triton), ("driver", driver_version()))


__all__ = [
    "CODERS",
    "conditions_of",
    "evaluator_kind",
    "judge_of",
    "make_coder",
    "make_device",
    "make_evaluator",
    "make_pool",
    "make_task",
    "region_judges",
    "versions_here",
    "versions_of",
]
