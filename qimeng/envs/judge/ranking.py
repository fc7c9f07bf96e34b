"""Compares judged programs: which one is better, and which gains are real.

Times are compared relative to eager's, which was timed in turns with each program. The same program can take up to 12 %
longer in other memory (measured on an H200), and eager then does too. Deals in times, their uncertainty, and the share
of the GPU time that generated kernels take. Knows nothing about searches or about how times are taken.
"""

from __future__ import annotations

import math

from qimeng.interfaces import Evaluation

TIE = 0.015
"""Programs within this share of each other's time are equally fast; a generated kernel is then preferred to PyTorch's,
because it can be read, changed and fused further."""
SMALLEST_GAIN = 0.005
"""Smaller gains do not count, because the same program differs by as much between two processes."""


def generated(evaluation: Evaluation) -> bool:
    """Whether generated kernels take at least half of the GPU time."""
    return (evaluation.generated_share or 0.0) >= 0.5


def preferred(new: Evaluation, old: Evaluation | None) -> bool:
    """Whether `new` replaces `old` as the best program: it is faster, or equally fast and generated."""
    if new.timing is None:
        return False
    if old is None or old.timing is None:
        return True
    return _ratio(new, old) < 1 + _allowance(new, old)


def beats(new: Evaluation | None, old: Evaluation | None) -> bool:
    """Whether `new` is better than `old` beyond what noise explains (twice the uncertainty of the times)."""
    if new is None or new.timing is None:
        return False
    if old is None or old.timing is None:
        return True
    allowance = _allowance(new, old)
    if allowance <= 0:
        allowance = min(allowance, -margin(new, old))
    return _ratio(new, old) < 1 + allowance


def gain(new: Evaluation | None, old: Evaluation | None) -> float | None:
    """How many times faster `new` is than `old`; None where either was not timed, or `new` takes no time at all."""
    if new is None or old is None or new.timing is None or old.timing is None or not new.timing.device_ms:
        return None
    return 1 / _ratio(new, old)


def margin(new: Evaluation, old: Evaluation | None = None) -> float:
    """The least gain that is not noise, as a share: twice the larger uncertainty, at least `SMALLEST_GAIN`."""
    known = [e.timing.uncertainty for e in (new, old) if e is not None and e.timing is not None]
    return max(SMALLEST_GAIN, 2 * max(known, default=0.0))


def refusal(final: Evaluation, parent: Evaluation | None) -> str | None:
    """Why a finally verified program is not returned, or None.

    Args:
        final: of the final verification, in turns with eager; the search found it better than `parent`.
        parent: what is known of the program returned in its place; None for the start program.
    """
    if not final.ok:
        return f"gate {final.gate.value}: {final.error}"
    if final.timing is None or parent is None or parent.timing is None:
        return None
    if beats(parent, final) and final.timing.device_ms > parent.timing.device_ms:  # else eager alone has changed
        return (
            f"{final.timing}{_beside(final)} when timed again is slower than "
            f"{parent.timing}{_beside(parent)} by more than twice the uncertainty ({margin(final):.1%})"
        )
    if final.speedup is not None and final.speedup < 1 - TIE:
        return f"{final.speedup:.3f} x PyTorch eager when timed again"
    return None


def _ratio(new: Evaluation, old: Evaluation) -> float:
    """Time of `new` over that of `old`, each as a share of eager's where both have that; views alone take none."""
    assert new.timing is not None and old.timing is not None
    if not old.timing.device_ms:
        return math.inf if new.timing.device_ms else 1.0
    ratio = new.timing.device_ms / old.timing.device_ms
    if new.eager is not None and old.eager is not None and new.eager.device_ms:
        ratio *= old.eager.device_ms / new.eager.device_ms
    return ratio


def _beside(evaluation: Evaluation) -> str:
    return f" ({evaluation.speedup:.3f} x eager)" if evaluation.speedup is not None else ""


def _allowance(new: Evaluation, old: Evaluation) -> float:
    """By what share `new` may be slower (positive) or must be faster (negative) to be preferred."""
    return TIE * (generated(new) - generated(old))


__all__ = ["TIE", "beats", "gain", "generated", "margin", "preferred", "refusal"]
