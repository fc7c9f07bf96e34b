"""Programs: an immutable choice of regions and of an implementation for each.

Deals in text (each implementation is source code) and in which code computes which region. Knows nothing about
checking, timing or choosing. `program.source` is the standalone file that a user takes away.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType

from qimeng.graph.fusion import Fusions
from qimeng.graph.opgraph import OpGraph
from qimeng.graph.region import Region, partition
from qimeng.program.emit import emit_program
from qimeng.program.schedule import Schedule


@dataclass(frozen=True)
class Implementation:
    """Source code that computes a region.

    Attributes:
        language: ``"torch"`` (PyTorch calls), ``"library"`` (one vendor-library call), or that of a backend
            (`qimeng.backend`): ``"triton"``, ``"cuda"`` …
        source: Python text that defines `entry`; every top-level name in it must be unique to this text.
        entry: name of the function; it takes the region's inputs in order, then the prepared buffers, and returns a
            tuple of the region's outputs.
        prepare: name of a function of the inputs numbered `prepare_inputs`, which returns a tuple of buffers; run
            again when one of those changes. Empty where nothing is prepared.
        prepare_inputs: positions of the region's inputs (all of them parameters or buffers) that `prepare` takes.
        schedule: what the template printed the source from; None where another coder wrote it. Whether a template did
            is another question (`qimeng.program.origin`).
    """

    language: str
    source: str
    entry: str
    prepare: str = ""
    prepare_inputs: tuple[int, ...] = ()
    schedule: Schedule | None = None

    @cached_property
    def digest(self) -> str:
        """Content hash."""
        return hashlib.blake2b(self.source.encode(), digest_size=8).hexdigest()

    @property
    def generated(self) -> bool:
        """True for kernels that were generated rather than called from a library."""
        return self.language not in ("torch", "library")


def torch_implementation(region: Region) -> Implementation:
    """The region on PyTorch: the implementation every program starts from."""
    entry = f"torch_{region.signature}"
    return Implementation("torch", region.function(entry), entry)


@dataclass(frozen=True, eq=False)
class Program:
    """Regions in topological order and the implementation of each.

    Attributes:
        graph: what is computed.
        regions: the partition.
        implementations: region signature to implementation; a region without one runs on PyTorch.
        fallback: source text of the whole computation where it could not be captured (one opaque region).
    """

    graph: OpGraph
    regions: tuple[Region, ...]
    implementations: Mapping[str, Implementation] = field(default_factory=dict)
    fallback: str = ""

    @classmethod
    def start(cls, graph: OpGraph) -> Program:
        """Every operator a region of its own, all on PyTorch."""
        return cls(graph, partition(graph))

    def region(self, region_id: str) -> Region:
        """The region called `region_id`.

        Raises:
            KeyError: no such region in this program.
        """
        try:
            return self._by_id[region_id]
        except KeyError:
            raise KeyError(f"no region {region_id}; this program has {list(self._by_id)}") from None

    @cached_property
    def _by_id(self) -> dict[str, Region]:
        return {r.id: r for r in self.regions}

    @cached_property
    def fusions(self) -> Fusions:
        """Which regions may become one."""
        return Fusions(self.regions)

    def implementation(self, region: Region) -> Implementation:
        """What computes `region`."""
        return self.implementations.get(region.signature) or torch_implementation(region)

    def schedule(self, region: Region) -> Schedule | None:
        """The template's schedule of `region`; None on PyTorch or where another coder wrote it."""
        implementation = self.implementations.get(region.signature)
        return implementation.schedule if implementation is not None else None

    @cached_property
    def on_pytorch(self) -> bool:
        """True where PyTorch computes all of it."""
        return all(self.implementation(region) == torch_implementation(region) for region in self.regions)

    def with_regions(self, regions: tuple[Region, ...]) -> Program:
        """The same computation, partitioned otherwise; implementations stay where the region is still there."""
        keep = {r.signature for r in regions}
        return replace(
            self, regions=regions, implementations={s: i for s, i in self.implementations.items() if s in keep}
        )

    def with_implementation(self, region_id: str, implementation: Implementation) -> Program:
        """The program with `implementation` for the region called `region_id` and all equal ones."""
        signature = self.region(region_id).signature
        return replace(self, implementations={**self.implementations, signature: implementation})

    @cached_property
    def source(self) -> str:
        """A standalone file (torch and triton only) whose class `Model` takes the reference's `state_dict`."""
        if self.fallback:
            return self.fallback
        return emit_program(self.graph, [(r, self.implementation(r)) for r in self.regions])

    @cached_property
    def digest(self) -> str:
        """Content hash of the source."""
        return hashlib.blake2b(self.source.encode(), digest_size=8).hexdigest()

    def load(self, name: str = "qimeng_program") -> ModuleType:
        """The source as a Python module of its own (see `load_source`)."""
        return load_source(self.source, name)


def load_source(source: str, name: str = "qimeng_program", folder: str | None = None) -> ModuleType:
    """Execute `source` as a module with a real file, which Triton needs to read its kernels' text.

    Args:
        source: Python text.
        name: module name.
        folder: where to write the file; by default a temporary folder that goes when this process ends.
    """
    import importlib.util
    import sys
    from pathlib import Path

    key = hashlib.blake2b(source.encode(), digest_size=6).hexdigest()
    path = Path(folder or _temporary_folder()) / f"{name}_{key}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _temporary_folder() -> str:
    """A folder that this process, but no fork of it, removes at its end."""
    import atexit
    import os
    import shutil
    import tempfile

    folder, owner = tempfile.mkdtemp(prefix="qimeng_"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
