"""What the rows of a report mean, for readers who have nothing but the report.

Deals in words; ``docs/glossary.md`` has the same ones. Knows nothing about figures.
"""

from __future__ import annotations

from collections.abc import Iterable

MEANINGS = {
    "device time": "median time of a call on the device, with a cold cache, and the spread of the middle half",
    "PyTorch eager": "the same for PyTorch, taken in turns with the program",
    "torch.compile, mode …": (
        "the same for torch.compile; outside a candidate's error budget where its result is less accurate than a "
        "candidate's has to be, such as TF32 where eager has fp32"
    ),
    "start program": "the graph on PyTorch, before the first step",
    "GPU time in generated kernels": "the generated share",
    "GPU time in a library's code": "the share of what the action library chose",
    "peak memory": "beyond inputs and parameters, beside PyTorch's",
    "error, maximum and rms": "the error against float64, beside what is allowed",
    "KernelBench's rule": (
        "whether KernelBench's own check passes: allclose against PyTorch at 1e-4 (half types 1e-2). It can fail where "
        "PyTorch is the one that is off"
    ),
    "verification": "of the final program, in a fresh process",
    "ended by": (
        "stop (the planner had no more ideas), seconds, evaluations, steps, interrupted, opaque (not captured), "
        "unjudged (not even PyTorch passed), failed (a planner raised)"
    ),
}
"""Row to its meaning."""


def meanings(labels: Iterable[str]) -> dict[str, str]:
    """Meanings of the rows that a report has.

    >>> list(meanings(["error, rms", "torch.compile, mode max-autotune", "seconds"]))
    ['torch.compile, mode …', 'error, maximum and rms']
    """
    begins = {label.partition(",")[0] for label in labels}
    return {row: text for row, text in MEANINGS.items() if row.partition(",")[0] in begins}


__all__ = ["MEANINGS", "meanings"]
