"""A device without memory for the reference is one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qimeng import KernelSpec
from qimeng.envs.judge import gpu_evaluator
from qimeng.errors import DeviceError


def test_a_spec_that_does_not_fit_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB.")

    monkeypatch.setattr(gpu_evaluator, "References", full)
    spec = KernelSpec.from_function(torch.relu, (torch.randn(4, 4),), name="wide")
    with pytest.raises(DeviceError, match="wide does not fit the free memory of cpu: .*6.00 GiB"):
        gpu_evaluator.GpuEvaluator(spec, torch_device="cpu")
