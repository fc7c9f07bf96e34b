"""The source that the pieces of kernels over rows and columns make: helpers, kernels, entry function.

Deals in text. Knows nothing about what the kernels do.
"""

from __future__ import annotations

from qimeng.coder.template.triton.row_pieces import Pieces

PRODUCT = """
@triton.jit
def _product(a, b):
    return a * b
"""


def source_of(p: Pieces) -> str:
    """The whole source; every kernel and launch is in `p`."""
    if any(e.param == "prod" for e in p.nest.reductions()):
        p.helpers.append(PRODUCT)
    return "".join(p.helpers) + "\n".join(p.kernels) + "\n" + _entry(p, len(p.plan.region.inputs))


def _entry(p: Pieces, inputs: int) -> str:
    """The entry function: it makes the views and the outputs and launches the kernels."""
    first = next((f"x{i}" for i, _ in enumerate(range(inputs))), None)
    lines = [f"def {p.prefix}_run({', '.join(f'x{i}' for i in range(inputs))}):"]
    lines += [f"    {line}" for line in p.loads.prelude]
    tensors = [p.loads.names[s.number] for s in p.nest.sources if not s.scalar]
    device = f"{tensors[0]}.device" if tensors else f"{first}.device"
    for i, (_, shape, stride, dtype) in enumerate(p.nest.outputs):
        lines.append(f"    y{i} = torch.empty_strided({shape}, {stride}, dtype=torch.{dtype}, device={device})")
    lines += [f"    {line.replace('DEVICE', device)}" for line in p.launches]
    return "\n".join([*lines, f"    return ({', '.join(f'y{i}' for i in range(len(p.nest.outputs)))},)"]) + "\n"


__all__ = ["source_of"]
