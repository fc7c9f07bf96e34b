"""What stands beside tensors in memory."""

from __future__ import annotations

import pytest
import torch

from qimeng.envs.workers.poison import FENCE, fenced


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fence_is_nan_on_both_sides(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5).to(dtype).t()
    y = fenced(x)
    assert torch.equal(x, y) and y.stride() == x.stride() and y.dtype is dtype and not y._is_view()
    beside = FENCE // x.itemsize
    around = torch.empty(0, dtype=dtype).set_(y.untyped_storage(), 0, (x.numel() + 2 * beside,), (1,))
    assert around[:beside].isnan().all() and around[-beside:].isnan().all() and not around[beside:-beside].isnan().any()


def test_what_has_no_memory_of_its_own_stays_as_it_is() -> None:
    for x in (torch.empty(0, 3), torch.randn(4, 1).expand(4, 7)):
        assert fenced(x) is x
    for x in (torch.tensor(2.5), torch.arange(7), torch.randn(4, 9)[:, ::2], torch.randn(3) + 1j):
        y = fenced(x)
        assert torch.equal(x, y) and y.stride() == x.stride() and y.data_ptr() != x.data_ptr()
