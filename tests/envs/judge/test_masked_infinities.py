"""Infinite inputs that a mask gives no weight: both what skips them and what multiplies them by zero is right."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional

from qimeng.envs.errors import error_budget
from qimeng.envs.judge.reference import References
from qimeng.envs.judge.trials import Trial
from qimeng.program.verify import capture_spec
from qimeng.spec import KernelSpec


class Causal(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def skipping(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same, where no masked element is read."""
    rows = []
    for i in range(q.shape[-2]):
        scores = q[..., i : i + 1, :] @ k[..., : i + 1, :].mT * q.shape[-1] ** -0.5
        empty = (scores == -torch.inf).all(-1, keepdim=True)  # of which PyTorch makes zeros
        rows.append(torch.where(empty, 0.0, torch.softmax(scores, -1)) @ v[..., : i + 1, :])
    return torch.cat(rows, -2)


def accepts(refs: References, trial: Trial, found: torch.Tensor) -> bool:
    error, text = error_budget.check(found, trial.outputs[0])
    return text is None or refs.look_again(trial, 0, found, error) is not None


def test_a_kernel_may_skip_what_is_masked_or_not():
    torch.manual_seed(0)
    spec = KernelSpec.from_module(Causal(), tuple(torch.randn(2, 2, 40, 16) for _ in range(3)))
    refs = References(spec, capture_spec(spec), torch.device("cpu"), partial(random.Random(1).getrandbits, 62))
    differed = 0
    for _ in itertools.repeat(None, 12):
        trial = refs._made("infinite", True)
        if trial is None:
            continue
        found = skipping(*refs.inputs(trial.draw))
        differed += int(bool((found.isfinite() & ~trial.outputs[0].value.isfinite()).any()))
        multiplied = trial.outputs[0].value
        assert accepts(refs, trial, found) and accepts(refs, trial, multiplied.clone())
        even = torch.arange(found.shape[-2])[:, None] // 8 % 2 == 0
        eager = torch.where(even, multiplied, found * (1 + 2**-22))  # skips in other blocks than the candidate does
        trial.outputs[0] = replace(trial.outputs[0], eager=eager)
        assert accepts(refs, trial, torch.where(even, found, multiplied))
        assert not accepts(refs, trial, torch.where(found.isfinite(), found + 0.01, found))
        hidden = found.isfinite() & ~multiplied.isfinite()
        trial.outputs[0] = replace(trial.outputs[0], eager=torch.where(hidden, found * (1 + 2**-10), multiplied))
        assert accepts(refs, trial, torch.where(hidden, found * (1 - 2**-10), multiplied))  # as far off as eager is
        assert not accepts(refs, trial, torch.where(hidden, found * (1 - 2**-6), multiplied)) or not bool(hidden.any())
        assert not accepts(refs, trial, found.nan_to_num(0.0, 0.0, 0.0)) or bool(found.isfinite().all())
    assert differed, "no draw had an infinity that a mask hides"


def test_zero_times_infinity_is_no_number_in_a_product():
    spec = KernelSpec.from_function(lambda x, y: x @ y, (torch.randn(8, 16), torch.randn(16, 8)))
    refs = References(spec, capture_spec(spec), torch.device("cpu"))
    assert not refs.weighs
    spec = KernelSpec.from_module(torch.nn.Linear(64, 32), (torch.randn(8, 64),), weights="int8")
    assert not References(spec, capture_spec(spec), torch.device("cpu")).weighs, "it prunes nothing"


def test_a_product_may_skip_the_zeros_that_a_spec_declares():
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 32)
    spec = KernelSpec.from_module(layer, (torch.randn(8, 64),), weights="bsr:16:13")
    refs = References(spec, capture_spec(spec), torch.device("cpu"), partial(random.Random(1).getrandbits, 62))
    trial = refs._made("infinite", False)
    assert trial is not None
    (x,), kept = refs.inputs(trial.draw), spec.module().known()
    with torch.no_grad():
        rows = [
            functional.linear(x[:, w != 0], w[None, w != 0], b[None]) for w, b in zip(kept, layer.bias, strict=True)
        ]
    found, multiplied = torch.cat(rows, 1), trial.outputs[0].value
    skipped = found.isfinite() & ~multiplied.isfinite()
    assert bool(skipped.any()) and accepts(refs, trial, found) and accepts(refs, trial, multiplied.clone())
    assert not accepts(refs, trial, torch.where(skipped, found + 0.01, found))
