"""Values that inputs and parameters take together: units, huge numbers met by zeros, what is not finite."""

from __future__ import annotations

import pytest
import torch

from qimeng.spec import KernelSpec, perturb_parameters
from qimeng.spec.perturb import SHARES, seed_of, share_of
from qimeng.spec.together import redistribute_together, tied, untied

REAL = ("real", "real")


def pair(distribution: str, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, y = torch.randn(32, 48).to(dtype), torch.randn(48, 40).to(dtype)
    return redistribute_together([x, y], REAL, distribution, seed)


def test_units_along_the_summed_axis_cancel_in_a_product_and_vary_by_orders_of_magnitude():
    torch.manual_seed(0)
    x, y = torch.randn(32, 48), torch.randn(48, 40)
    shared = ranges = 0
    for seed in range(40):
        a, b = redistribute_together([x, y], REAL, "units", seed)
        column, row = (a / x).abs()[0], (b / y).abs()[:, 0]
        assert torch.equal(column.log2(), column.log2().round()), "powers of two: no digit changes"
        products = (column * row).log2()
        if len(products.unique()) == 1 and len(column.unique()) > 4:
            shared += 1
            ranges = max(ranges, float(column.max() / column.min()))
    assert shared >= 15 and ranges > 1e9, "1e-6 to 1e6"


def test_a_huge_column_is_met_by_a_row_of_zeros():
    met, values = 0, set()
    for seed in range(40):
        a, b = pair("huge", seed)
        for first, second in ((a, b.t()), (b.t(), a)):
            big = (first.abs() > 100).any(0)
            if big.any() and not second[:, big].any():
                met += 1
                values.add(float(first.abs().max()))
    assert met >= 20 and {1e4, 1e9, torch.finfo(torch.float32).max} <= values, "the last one negative"
    half = [pair("huge", seed, torch.float16)[0] for seed in range(20)]
    assert all(x.isfinite().all() for x in half) and max(float(x.abs().max()) for x in half) == 65504


def test_few_numbers_are_not_finite_and_the_rest_is_as_given():
    torch.manual_seed(0)
    x, y = torch.rand(32, 48) + 1, torch.randn(48, 40)
    kinds = set()
    for seed in range(40):
        made = redistribute_together([x, y, 3], ("positive", "real", "scalar"), "infinite", seed)
        for new, old in zip(made[:2], (x, y), strict=True):
            odd = ~new.isfinite()
            assert int(odd.sum()) <= 4 and torch.equal(new[~odd], old[~odd])
            kinds |= {str(float(v)) for v in new[odd]}
        assert not (made[0] == -torch.inf).any() and sum(not bool(m.isfinite().all()) for m in made[:2]) == 1
    assert kinds == {"inf", "-inf", "nan"}


def test_domains_dtypes_and_strides_are_respected():
    x, mask, index = torch.randn(16, 24).t(), torch.ones(24, 16), torch.arange(24)
    for distribution in ("units", "huge", "infinite"):
        a, b, c = redistribute_together([x, mask, index], ("real", "mask", "index"), distribution, 3)
        assert a.stride() == x.stride() and b is mask and c is index
        (half,) = redistribute_together([torch.rand(16, 24).half()], ("real",), distribution, 3)
        assert half.dtype is torch.float16
    for seed in range(20):
        a, b = pair("units", seed, torch.float16)
        assert bool(a.isfinite().all()) and float(a.abs().max()) < 64, "small powers for half types"
    assert redistribute_together([1, "text"], ("scalar", "scalar"), "units", 0) == [1, "text"]


@pytest.mark.parametrize("distribution", ["units", "huge"])
def test_parameters_go_with_the_inputs(distribution):
    """A linear layer's weight has the inverse units of its inputs by some seeds, and zeros where they are huge."""
    spec = KernelSpec.from_module(torch.nn.Linear(48, 32), (torch.randn(24, 48),))
    found = 0
    for seed in range(24):
        module, x = spec.module(), spec.inputs(seed, "cpu", distribution)[0]
        given = spec.inputs(seed)[0]
        before = module.weight.clone()
        perturb_parameters(module, tied(seed_of(1, 0), distribution, seed))
        if distribution == "huge":
            big = (x.abs() > 900).any(0)
            found += bool(big.any()) and not module.weight[:, big].any()
        else:
            mine, theirs = (x / given).abs()[0].log2(), (module.weight / before).abs()[1].log2()
            together = (mine + theirs).round()
            found += len(together.unique()) == 1 and len(mine.round().unique()) > 4
    assert found >= (12 if distribution == "huge" else 3)


def test_a_seed_keeps_what_it_stands_for():
    for share in range(len(SHARES)):
        seed = seed_of(12345, share, signs=True, fixed=True)
        for distribution in ("units", "huge"):
            bound = tied(seed, distribution, (1 << 62) - 1)
            assert share_of(bound) == share_of(seed) == share and bound % 16 == seed % 16 and 0 < bound < 1 << 62
            assert untied(bound) == (distribution, (1 << 48) - 1)
        assert tied(seed, "given", 7) == seed and untied(seed)[0] == ""


def test_buffers_change_where_a_seed_says_so():
    module = torch.nn.Module()
    module.register_buffer("ones", torch.ones(64))
    module.register_buffer("causal", torch.ones(16, 16, dtype=torch.bool).tril())
    module.register_buffer("penalty", torch.full((16, 16), -torch.inf).triu(1))
    module.register_buffer("table", torch.randint(0, 9, (64,)))
    module.register_buffer("positions", torch.arange(64))
    module.register_buffer("count", torch.tensor(7))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    perturb_parameters(module, seed_of(1, 1))
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    perturb_parameters(module, seed_of(1, 1, fixed=True))
    after = module.state_dict()
    assert {k for k in after if torch.equal(after[k], before[k])} == {"count"}
    for name in ("causal", "penalty", "table"):
        assert torch.equal(after[name].flatten().sort().values, before[name].flatten().sort().values), name
    assert torch.equal(after["positions"], after["positions"].sort().values) and after["positions"][-1] == 63


def test_inputs_that_are_always_the_same_stay_so():
    x = torch.randn(16, 24)
    for distribution in ("units", "huge", "infinite"):
        for seed in range(6):
            a, b = redistribute_together([x, x.clone()], REAL, distribution, seed, same=(0, 0))
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and not torch.equal(a.nan_to_num(7.0), x)
