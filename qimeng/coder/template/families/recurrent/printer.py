"""The recurrent family as Triton source.

One launch walks all steps. A program owns some sequences ([PB, 1]) and some units ([1, RB]) of every state; its states
stay in registers from step to step. States that products read are exchanged through memory, in two buffers that take
turns. Where several programs share a sequence they wait for each other after each step; all of them run at the same
time, which CUDA guarantees (or refuses) for a cooperative launch (Diamos et al., "Persistent RNNs", 2016, keep weights
in registers the same way). Or they wait for the states themselves, where each step's are kept (`by_value`), as NCCL's
LL protocol does. Triton's interpreter runs programs one by one, so there each step is a launch of its own.
Where states are exchanged the loop is not pipelined, as none may be read before the others have written it; what the
next step reads of the inputs is loaded, and what this one returns is stored, between the signal to the others and the
wait for them. Groups have programs of their own. Deals in kernel text. Knows nothing about how products are computed,
nor which schedule is good.
"""

from __future__ import annotations

import re

from qimeng.coder.template.families.recurrent.plan import Part, RecurrentPlan, accumulated
from qimeng.coder.template.families.recurrent.products import ABSENT, Products, masked, state_at
from qimeng.coder.template.families.recurrent.schedule import RecurrentSchedule
from qimeng.coder.template.nest.axes import strides_of
from qimeng.coder.template.triton import ops
from qimeng.coder.template.triton.emitter import Emitter, Walk, without_unused
from qimeng.coder.template.triton.row_pieces import Pieces
from qimeng.graph.opgraph import row_major
from qimeng.program.program import Implementation


def print_recurrent(plan: RecurrentPlan, schedule: RecurrentSchedule, prefix: str) -> Implementation:
    """The implementation of a region under `schedule`.

    Args:
        plan: the region as a loop.
        schedule: block sizes.
        prefix: beginning of every top-level name.
    """
    return Implementation("triton", _Printer(plan, schedule, prefix).source(), f"{prefix}_run", schedule=schedule)


class _Printer:
    def __init__(self, plan: RecurrentPlan, schedule: RecurrentSchedule, prefix: str):
        self.plan, self.schedule, self.prefix = plan, schedule, prefix
        self.pieces = Pieces(plan, schedule, prefix)
        self.shares, self.groups = self.pieces.steps, plan.group_count
        self.type = ops.TRITON_DTYPE[accumulated(plan)]
        self.stored = ops.TRITON_DTYPE[plan.stored]
        self.products = Products(plan, schedule, prefix, self.pieces)
        self.by_value = schedule.by_value and bool(plan.exchanged)
        self.together = self.shares * (self.groups if plan.coupled else 1)  # programs that wait for each other

    # -- the kernel

    def _body(self) -> list[str]:
        plan = self.plan
        lines, em = self._places()
        self.guard = masked(em.mask("pr")).removesuffix(", other=0.0")
        expr, shape, *_ = plan.nest.outputs[0]
        self.place = em.offset(strides_of(plan.nest.axes, expr.dims, row_major(shape)), "pr")
        for i, source in enumerate(plan.states):
            begin = state_at(plan, self.schedule, i, "first")
            lines.append(f"h{i} = tl.load({begin} + {self.place}{masked(em.mask('pr'))}).to({self.type})")
            self._define(em, source, f"h{i}")
        lines += self.products.before(em)
        for number, product in enumerate(plan.products):
            self._define(em, product.source, f"d{number}")
        lines += [f"x{part.source}_ptr = a{part.input}_ptr" for part in plan.parts if part.place is None]
        moving = [part for part in plan.parts if part.place is not None]
        if plan.exchanged:
            lines += self._alike(em)
            fetched = self._fetched(moving, em)
            lines += ["at = first", *fetched] if fetched else []
            step = self.products.step(em) + self._results(em, fetched)
        else:
            step = [self._pointer(part, "t") for part in moving] + self.products.step(em) + self._results(em, [])
        stages = 1 if plan.exchanged else self.schedule.stages
        lines += [f"for t in tl.range(first, last, num_stages={stages}):", *[f"    {line}" for line in step]]
        for i in range(len(plan.states)):
            if i not in plan.exchanged:
                end = f"s{i}_ptr + (last % 2) * {self.plan.state_size} + {self.place}"
                lines.append(f"tl.store({end}, h{i}.to({self.stored}){self.guard})")
        return lines

    def _places(self) -> tuple[list[str], Emitter]:
        """Lines that set which units and sequences of which group a program has, and an emitter that knows them."""
        p, plan = self.pieces, self.plan
        rows, row_walks = p.rows(f"pid // {self.shares * self.groups}")
        columns, column_walks = p.columns(f"pid % {self.shares}")
        lines = ["pid = tl.program_id(0)", *rows, *columns]
        if plan.groups:
            lines.append(f"group = (pid // {self.shares}) % {self.groups}")
            row_walks = [Walk("group", *plan.groups), *row_walks]
        return lines, p.emitter(row_walks + column_walks)

    def _define(self, em: Emitter, source: int, name: str) -> None:
        for e in self.plan.nest.exprs:
            if e.op == "load" and e.param == source:
                em.define(e, name)

    def _alike(self, em: Emitter) -> list[str]:
        """Lines that load what every step reads alike."""
        plan = self.plan
        sources = {part.source for part in plan.parts if part.place is None}
        for e in plan.nest.exprs:
            if e.op == "load" and e.param in sources:
                em.value(e)
        return self.pieces.flush(em)

    def _fetched(self, moving: list[Part], em: Emitter) -> list[str]:
        """Lines that load what step `at` reads of the inputs into variables that the step takes them from."""
        sources, lines = {part.source for part in moving}, [self._pointer(part, "at") for part in moving]
        loads = [e for e in self.plan.nest.exprs if e.op == "load" and e.param in sources]
        names = {f"q{i}": em.value(e) for i, e in enumerate(loads)}
        lines += [*self.pieces.flush(em), *(f"{name} = {text}" for name, text in names.items())]
        for e, name in zip(loads, names, strict=True):
            em.define(e, name)
        return lines if loads else []

    def _pointer(self, part: Part, step: str) -> str:
        """The line that makes the pointer to what a step, the number in the variable `step`, reads of an input."""
        assert part.place is not None
        number, meta = re.sub(r"\bt\b", step, part.place.text()), self.plan.metas[part.input]
        far = (max(n for n in meta.shape) * part.stride).bit_length() > 31
        walked = f"tl.cast({number}, tl.int64)" if far else f"({number})"
        return f"x{part.source}_ptr = a{part.input}_ptr + {walked} * {part.stride}"

    def _results(self, em: Emitter, fetched: list[str]) -> list[str]:
        """Exchange states, store what a step returns, let states follow; `fetched` loads what the next step reads."""
        plan, p = self.plan, self.pieces
        outputs = [plan.nest.outputs[i][0] for i in plan.results]
        texts = [em.value(e) for e in outputs]
        lines, count = p.flush(em), len(plan.states)
        for i, text in enumerate(texts[:count]):
            rounded = "" if self.stored == self.type else f".to({self.stored}).to({self.type})"
            wide = text if em.side(outputs[i]) == "pr" else f"tl.broadcast_to({text}, (PB, RB))"
            lines.append(f"n{i} = {wide}{rounded}" if wide.isidentifier() else f"n{i} = ({wide}){rounded}")
        for i in plan.exchanged:
            if self.by_value:  # no NaN but this one
                lines.append(f"n{i} = tl.where(n{i} != n{i}, float('nan'), n{i})")
            place = f"{state_at(plan, self.schedule, i, '(t + 1)')} + {self.place}"
            lines.append(f"tl.store({place}, n{i}.to({self.stored}){self.guard})")
        lines += self._signal() if plan.exchanged else []
        for k, text in enumerate(texts[count:]):
            if self.by_value and k in plan.returned.values():
                continue
            _, back = plan.loop.stacked[k]
            dtype = ops.TRITON_DTYPE[plan.nest.outputs[plan.results[count + k]][3]]
            far = plan.loop.count * self.plan.state_size >= 1 << 31
            number = f"{plan.loop.count - 1} - t" if back else "t"
            walked = f"tl.cast({number}, tl.int64)" if far else f"({number})"
            wide = text if em.side(outputs[count + k]) == "pr" else f"tl.broadcast_to({text}, (PB, RB))"
            place = f"z{k}_ptr + {walked} * {self.plan.state_size} + {self.place}"
            lines.append(f"tl.store({place}, ({wide}).to({dtype}){self.guard})")
        lines += [f"h{i} = n{i}" for i in range(count)]
        lines += ["at = tl.minimum(t + 1, last - 1)", *fetched] if fetched else []
        return lines + self._wait() if plan.exchanged else lines

    def _signal(self) -> list[str]:
        """Say that the states of this step are where the next one reads them."""
        if self.by_value:
            return []
        if self.together == 1:
            return ["tl.debug_barrier()"]
        add = f'tl.atomic_add(flags_ptr + pid // {self.together}, 1, sem="release")'
        return ["if t + 1 < last:", "    tl.debug_barrier()", f"    {add}"]

    def _wait(self) -> list[str]:
        """Go on when the others have said so."""
        if self.together == 1 or self.by_value:
            return []
        flag = f"flags_ptr + pid // {self.together}"
        return [
            "if t + 1 < last:",
            f"    done = tl.load({flag}, volatile=True)",
            f"    while done < (t + 1 - first) * {self.together}:",
            f"        done = tl.load({flag}, volatile=True)",
            f'    tl.atomic_add({flag}, 0, sem="acquire")  # what the others wrote before is seen from here on',
            "    tl.debug_barrier()",
        ]

    # -- the source around it

    def source(self) -> str:
        """The kernel and the entry function."""
        plan, loop = self.plan, self.plan.loop
        lines = without_unused(self._body())
        words = set(re.findall(r"\w+", "\n".join(lines)))
        texts = [plan.loads.names[plan.loads.values[v].number] for v in plan.node.args]
        table = {f"a{i}_ptr": text for i, text in enumerate(texts)}
        table |= {f"s{i}_ptr": f"s{i}" for i in range(len(plan.states))}
        table |= {f"z{k}_ptr": f"z{k}" for k in range(len(loop.stacked))}
        table |= {name: name for name in ("flags_ptr", "first", "last")}
        params = [name for name in table if name in words]
        kernel = f"@triton.jit\ndef {self.prefix}_steps({', '.join(params)}, "
        kernel += "PB: tl.constexpr, RB: tl.constexpr, KB: tl.constexpr):\n"
        kernel += "".join(f"    {line}\n" for line in lines)
        helpers = [*self.pieces.helpers, *self.products.helpers(kernel)]
        return "\n".join([*helpers, kernel, self._entry(texts, [table[name] for name in params])])

    def _entry(self, texts: list[str], arguments: list[str]) -> str:
        """The entry function: views, states, outputs, the launch."""
        plan, s = self.plan, self.schedule
        lines = list(plan.loads.prelude)
        device = f"{texts[0]}.device"
        held = plan.returned if self.by_value else {}
        for i, start in enumerate(plan.loop.starts):
            meta = plan.metas[int(start[1:])]
            if i in held:
                continue
            lines.append(f"s{i} = torch.empty({(2, *meta.shape)}, dtype=torch.{meta.dtype}, device={device})")
            lines.append(f"s{i}[0].copy_({texts[int(start[1:])]})")
        for k in range(len(plan.loop.stacked)):
            _, shape, _, dtype = plan.nest.outputs[plan.results[len(plan.states) + k]]
            rows = plan.loop.count + (k in held.values())
            lines.append(f"z{k} = torch.empty({(rows, *shape)}, dtype=torch.{dtype}, device={device})")
        for i, k in held.items():
            integer, absent = ABSENT[plan.stored]
            lines.append(f"z{k}[0].copy_({texts[int(plan.loop.starts[i][1:])]})")
            lines.append(f"z{k}[0].masked_fill_(z{k}[0].isnan(), float('nan'))")
            lines.append(f"z{k}[1:].view(torch.{integer}).fill_({absent})")
        waits = self.together > 1 and bool(plan.exchanged)
        programs = self.pieces.programs * self.groups * self.shares
        if waits and not self.by_value:
            count = programs // self.together
            lines.append(f"flags_ptr = torch.zeros({count}, dtype=torch.int32, device={device})")
        count = plan.loop.count
        together = ", launch_cooperative_grid=True" if waits else ""
        options = f"PB={s.block_p}, RB={s.block_r}, KB={s.block_k}, num_warps={s.warps}{together}"
        launch = f"{self.prefix}_steps[({programs},)]({', '.join(arguments)}, {options})"
        lines += [
            f'span = 1 if {device}.type == "cpu" else {count}',
            f"for first in range(0, {count}, span):",
            "    last = first + span",
            f"    {launch}",
        ]
        results = [f"z{k}[1:]" if k in held.values() else f"z{k}" for k in range(len(plan.loop.stacked))]
        for i in range(len(plan.states)):
            results.append(f"z{held[i]}[{count}].clone()" if i in held else f"s{i}[{count % 2}]")
        views, outputs = plan.after
        lines += [f"found = ({''.join(f'{r}, ' for r in results)})", *views]
        head = f"def {self.prefix}_run({', '.join(f'x{i}' for i in range(len(plan.region.inputs)))}):"
        return "\n".join([head, *[f"    {line}" for line in lines], f"    return ({', '.join(outputs)},)"]) + "\n"


__all__ = ["print_recurrent"]
