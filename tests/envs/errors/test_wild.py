"""Which trials on wild inputs say something."""

from __future__ import annotations

import pytest
import torch

from qimeng.envs.errors.accuracy import Error
from qimeng.envs.errors.discrete import Dividing, Rounding
from qimeng.envs.errors.error_budget import Expected
from qimeng.envs.errors.extreme_inputs import LOST, overflowing, says_nothing
from qimeng.envs.judge.reference import References
from qimeng.spec import KernelSpec


def test_a_trial_on_which_eager_is_far_off_or_overflows_says_nothing():
    value = torch.ones(4)
    good, lost = Expected(value, Error(1e-6)), Expected(value, Error(2 * LOST))
    assert not says_nothing("units", [good], 0.0) and says_nothing("units", [good, lost], 0.0)
    assert says_nothing("huge", [good], 1e-6) and not says_nothing("infinite", [good], 1.0)
    integers = Expected(torch.ones(4, dtype=torch.int32), eager=torch.zeros(4, dtype=torch.int32))
    flags = Expected(torch.ones(4, dtype=torch.bool), eager=torch.zeros(4, dtype=torch.bool))
    assert says_nothing("units", [integers], 0.0), "of 1e12 no float32 has a last digit"
    assert not says_nothing("units", [flags], 0.0)


def test_an_overflow_in_between_is_seen_and_a_mask_is_none():
    big = torch.full((4, 4), torch.finfo(torch.float32).min)
    assert overflowing("huge", lambda: big * 2 > 0)[1] == 1.0
    masked, share = overflowing("huge", lambda: torch.softmax(big.masked_fill(big.tril() == 0, -torch.inf), -1))
    assert share == 0.0 and masked.shape == (4, 4)
    assert overflowing("given", lambda: big * 2)[1] == 0.0


def test_operators_of_operators_and_float8_in_between_are_watched():
    x = torch.full((4, 4), 0.5)
    branches = (lambda t: t.sin(), lambda t: t.cos(), (x,))
    modes = Rounding(torch.float32, "default", 1), Dividing()
    for mode in modes:
        with mode:
            assert torch.allclose(torch.cond(x.sum() > 0, *branches), x.sin())
    assert overflowing("huge", lambda: torch.cond(x.sum() > 0, *branches))[1] == 0.0
    assert overflowing("huge", lambda: x.to(torch.float8_e4m3fn).float())[1] == 0.0
    assert overflowing("huge", lambda: (x * 1e4).to(torch.float8_e5m2).float())[1] == 0.0
    assert overflowing("huge", lambda: (x * 1e6).to(torch.float8_e5m2).view(torch.int8) > 0)[1] == 1.0


def test_a_masked_column_is_tried_and_sums_that_overflow_are_not():
    """On huge inputs the sign of a product may hang on the order of its sum: only where it does not is it a trial."""
    refs = References(
        KernelSpec.from_function(lambda x, y: x @ y > 0, (torch.randn(32, 48), torch.randn(48, 32))),
        None,
        torch.device("cpu"),
    )
    made = [t for _ in range(16) if (t := refs._made("huge", False)) is not None]
    assert len(made) >= 8
    for trial in made:
        x, y = refs.inputs(trial.draw)
        assert (x @ y).isfinite().all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_operators_of_sparse_and_nested_tensors_are_watched() -> None:
    big = torch.full((3, 4), 3e38)
    mask = torch.tensor([[True, True, False, False]] * 2)
    for times, seen in ((1.0, 0.0), (2.0, 1.0)):
        assert overflowing("huge", lambda t=times: torch.sparse.mm((big * 1).to_sparse() * t, big.t() * 0))[1] == seen
        nested = torch._nested_tensor_from_mask(big[:2, :, None] / 2, mask)
        assert overflowing("huge", lambda t=times, x=nested: (x * (2 * t)).to_padded_tensor(0.0))[1] == seen
