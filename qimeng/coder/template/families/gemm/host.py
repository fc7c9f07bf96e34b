"""The gemm family as Triton source: what an entry function packs and launches, and the file around it.

The entry packs what has to be packed, launches the product, and, where the depth is split or the result is reduced, a
small kernel or two that sum the parts and finish. Deals in the host's text. Knows nothing about which schedule is good
(see `qimeng.coder.template.families.gemm.sweeps`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from qimeng.coder.template.families.gemm import guard
from qimeng.coder.template.families.gemm.helpers import BFLOAT16, POWER, PROGRAMS, SHORT
from qimeng.coder.template.families.gemm.inline import Inline
from qimeng.coder.template.families.gemm.kernels import Kernels
from qimeng.coder.template.families.gemm.loop import indent
from qimeng.coder.template.families.gemm.operand import Operand, sources_of
from qimeng.coder.template.families.gemm.operands import operand
from qimeng.coder.template.families.gemm.pack import Packer, Scaler
from qimeng.coder.template.families.gemm.plan import GemmPlan
from qimeng.coder.template.families.gemm.planes import Planes
from qimeng.coder.template.families.gemm.schedule import GemmSchedule
from qimeng.coder.template.families.gemm.scheme import is_prepared, scheme_of
from qimeng.coder.template.families.gemm.stager import Stager
from qimeng.coder.template.families.gemm.staging import NAME, under
from qimeng.coder.template.triton.aligned import ALIGNED
from qimeng.coder.template.triton.rounding import ROUND
from qimeng.program.program import Implementation


def print_gemm(plan: GemmPlan, schedule: GemmSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`.

    Args:
        plan: the region as a product.
        schedule: block sizes, precision and forms.
        prefix: beginning of every top-level name.

    Raises:
        Unsupported: the schedule does not fit the plan.
    """
    host = _Host(under(plan, schedule), schedule, prefix)
    once = bool(host.prepared)
    return Implementation(
        "triton",
        host.source(),
        f"{prefix}_run",
        prepare=f"{prefix}_prepare" if once else "",
        prepare_inputs=host.inputs_of(host.variables(host.prepared)) if once else (),
        schedule=schedule,
    )


def with_inputs(made: Implementation, prefix: str, inputs: Sequence[str], hidden: str, shown: str) -> Implementation:
    """`made`, its entry function with other parameters, where another family reads an operand in its own way.

    Args:
        made: what `print_gemm` made.
        prefix: as there.
        inputs: the parameters.
        hidden: the input of the product that is none of them.
        shown: the parameter that stands for it where the text needs a tensor.
    """
    text, entry = made.source, f"def {prefix}_run("
    start = text.index(entry) + len(entry)
    body = text[start:].split(":\n", 1)[1]
    if re.search(rf"\b{hidden}\b", body):
        body = f"    {hidden} = {shown}\n{body}"
    return replace(made, source=f"{text[:start]}{', '.join(inputs)}):\n{body}")


class _Host:
    def __init__(self, plan: GemmPlan, schedule: GemmSchedule, prefix: str):
        self.region, self.nest, self.loads, self.plan, self.prefix = plan.region, plan.nest, plan.loads, plan, prefix
        self.schedule = schedule
        loads = plan.loads
        a, b = (operand(plan, schedule, side, prefix, loads.names) for side in plan.sides)
        self.operands = (a, b)
        self.prepared = [o for o in self.operands if is_prepared(plan, schedule, o.side)]
        self.stager = Stager(plan, schedule, prefix) if NAME in loads.names.values() else None
        follows = self.stager is not None or any(o.made and o not in self.prepared for o in self.operands)
        self.kernels = Kernels(plan, schedule, self.operands, loads.names, prefix, follows)

    def source(self) -> str:
        """The whole text."""
        launched = self.kernels.kernels()
        parts = [self.kernels.epilogue_function(), *(k.text for k in launched)]
        parts += [Packer(o, self.schedule).source() for o in self.operands if isinstance(o, Planes)]
        parts += [Scaler(o, self.schedule).source() for o in self.operands if isinstance(o, Inline) and o.made]
        if self.stager is not None:
            parts.append(self.stager.source())
        if self.prepared:
            parts.append(self._prepare())
        parts.append(self._entry([k.launch for k in launched]))
        body = "\n\n\n".join(p.strip("\n") for p in parts) + "\n"
        named = {
            "power": POWER, "round": ROUND, "bfloat16": BFLOAT16, "aligned": ALIGNED, "programs": PROGRAMS,
            "short": SHORT,
        }  # fmt: skip
        scheme = scheme_of(self.plan, self.schedule)
        dropped = 24 - scheme.bits
        numbers = {"prefix": self.prefix, "bits": scheme.bits, "half": 1 << (dropped - 1), "mask": -(1 << dropped)}
        helpers = {name: text.format(**numbers) for name, text in named.items()}
        helpers |= guard.helpers(self.prefix, scheme, self.plan.shape[3])
        head: list[str] = []
        for name, text in reversed(helpers.items()):  # the last ones may call those before
            if f"{self.prefix}_{name}(" in "\n".join([*head, body]):
                head.insert(0, text.strip("\n"))
        if "TensorDescriptor(" in body:
            head.insert(0, "from triton.tools.tensor_descriptor import TensorDescriptor")
        return "\n\n\n".join([*head, body])

    # -- inputs
    def variables(self, operands: Sequence[Operand]) -> list[str]:
        """Variables of the sources below `operands`."""
        numbers = {i for o in operands for i in sources_of(o.side)}
        return [self.loads.names[i] for i in sorted(numbers)]

    def views(self, names: Sequence[str]) -> list[str]:
        """Lines of the prelude that `names` need."""
        wanted, kept = set(names), []
        for line in reversed(self.loads.prelude):
            target, call = line.split(" = ", 1)
            if target in wanted:
                kept.append(line)
                wanted |= set(re.findall(r"\b[wx]\d+\b", call))
        return kept[::-1]

    def inputs_of(self, names: Sequence[str]) -> tuple[int, ...]:
        """Positions of the region's inputs that `names` come from."""
        text = " ".join([*names, *self.views(names)])
        return tuple(sorted({int(i) for i in re.findall(r"\bx(\d+)\b", text)}))

    def _read(self) -> list[str]:
        """Variables that the entry function itself reads."""
        numbers = set(self.kernels.epilogue.sources()) | set(self.kernels.epilogue.final_sources())
        numbers |= {i for o in self.operands if o not in self.prepared for i in sources_of(o.side)}
        numbers |= {i for side in self.plan.original.sides if self.kernels.exact for i in sources_of(side)}
        numbers |= set(self.stager.sources if self.stager else ())
        return [self.loads.names[i] for i in sorted(numbers)]

    def _tensor(self) -> str:
        """An input that is a tensor."""
        kinds = [self.region.graph.nodes[v.node].kind for v in self.region.inputs]
        return f"x{next(i for i, kind in enumerate(kinds) if kind != 'scalar')}"

    # -- functions
    def _pack(self, o: Operand) -> str:
        return f"{o.maker}({', '.join(self.variables([o]))})"

    def _prepare(self) -> str:
        names = self.variables(self.prepared)
        inputs = ", ".join(f"x{i}" for i in self.inputs_of(names))
        doc = '    """What is packed once: operands made of parameters alone."""'
        made = ", ".join(f"*{self._pack(o)}" for o in self.prepared)
        lines = [f"def {self.prefix}_prepare({inputs}):", doc, *indent(self.views(names)), f"    return ({made},)"]
        return "\n".join(lines) + "\n"

    def _entry(self, launches: Sequence[str]) -> str:
        given = [v for o in self.prepared for v in o.made] + [v for o in self.operands for v in o.given]
        skips = self.kernels.skips
        given += skips.given if skips else ()
        inputs = [f"x{i}" for i in range(len(self.region.inputs))]
        lines = [*self.views(self._read()), f"device = {self._tensor()}.device"]
        for i, (_, shape, stride, dtype) in enumerate(self.nest.outputs):
            lines.append(f"y{i} = torch.empty_strided({shape}, {stride}, dtype=torch.{dtype}, device=device)")
        lines += [self.stager.call] if self.stager else []
        for o in self.operands:
            if o.made and o not in self.prepared:
                lines.append(f"{', '.join(o.made)}, = {self._pack(o)}")
        lines += [line for o in self.operands for line in o.host]
        lines += [*self.kernels.buffers(), *(skips.made if skips else ()), *launches]
        lines.append(f"return ({', '.join(f'y{i}' for i in range(len(self.nest.outputs)))},)")
        head = f"def {self.prefix}_run({', '.join([*inputs, *given])}):"
        return "\n".join([head, *indent(lines)]) + "\n"


__all__ = ["print_gemm", "with_inputs"]
