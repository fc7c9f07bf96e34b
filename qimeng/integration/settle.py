"""What stays in a model for one kind of call: its programs, a recording of the whole call, or its own code alone.

Deals in the whole model beside the original. The parts were verified one by one; the whole has to be right too, and
faster. Knows nothing about how programs are found.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from qimeng.errors import SpecError
from qimeng.integration.calls import key_of, tensors_of
from qimeng.integration.copies import shared_copy
from qimeng.integration.dispatch import Dispatch, detach, dispatch_of, own_code, take_out
from qimeng.integration.record import Record
from qimeng.integration.recording import Recording
from qimeng.integration.whole import Compared, compare, differences

FASTER = 1.02
"""Gain over the model without it for which a recording stays: it holds memory for the inputs and everything between."""


def settle(record: Record, original: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hold the model against the original on one call; keep what is right and fastest, and note what was taken out.

    Args:
        record: of the optimized model; gets the comparison.
        original: the model before; the same module where it was optimized in place.
        args: of the call.
        kwargs: of the call.
    """
    programs = any(part.variant is not None and part.variant.places is not None for part in record.parts)
    compared = _compared(record, original, args, kwargs) if programs else None
    if compared is not None and not compared.same:
        _take_programs_out(
            record,
            f"the programs together differ from the model by {compared.error:.3g} of its results (limit "
            f"{compared.limit:.3g})",
        )
    elif all(t.is_cuda for t in (*record.model.parameters(), *tensors_of((args, kwargs)))):
        recorded = _recorded(record, original, args, kwargs, compared)
        if recorded is None and compared is not None and (compared.speedup or 1.0) < 1.0:
            _take_programs_out(record, f"the model is slower with the programs ({compared.speedup:.2f} x eager)")
            compared = replace(compared, error=0.0, optimized_ms=compared.original_ms)
            recorded = _recorded(record, original, args, kwargs, None)
        compared = recorded or compared
    if compared is not None:
        record.compared.append(compared)


def _take_programs_out(record: Record, why: str) -> None:
    record.restore()
    record.notes.append(f"{why}, so that all were taken out")
    record.parts = [replace(p, variant=None, reason=p.reason or "taken out") for p in record.parts]


def _recorded(
    record: Record, original: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], before: Compared | None
) -> Compared | None:
    """The comparison with the whole call recorded as a CUDA graph, where that stays; None where it does not."""
    model, key = record.model, key_of(args, kwargs)
    present = model.__dict__.get("forward")
    if key is None or (isinstance(present, Dispatch) and key in present.variants):
        return None
    dispatch = dispatch_of(model)
    recording = Recording(key, dispatch.original)
    dispatch.add(recording)
    compared = _compared(record, original, args, kwargs)
    least = FASTER * ((before and before.speedup) or 1.0)
    if not recording.refused and compared.same and compared.speedup is not None and compared.speedup >= least:
        record.notes.append("calls of the whole model are recorded as a CUDA graph and replayed")
        return compared
    take_out(model, key)
    if recording.refused:
        record.notes.append(f"calls of the whole model are not recorded as a CUDA graph: {recording.refused}")
    return None


def _compared(record: Record, original: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compared:
    model = record.model
    if original is not model:
        return compare(original, model, args, kwargs)
    with own_code(model), torch.no_grad():
        wanted = model(*args, **kwargs)
    try:
        original = shared_copy(original)
    except SpecError:  # it was optimized in place since it cannot be copied
        record.notes.append("the whole model was not timed: it cannot be copied")
        with torch.no_grad():
            return differences(wanted, model(*args, **kwargs))
    for part in original.modules():
        detach(part)
    return compare(original, model, args, kwargs)


__all__ = ["settle"]
