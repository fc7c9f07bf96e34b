"""The action that stores single elements in another form: where it is legal, and what is printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qimeng import IllegalAction
from qimeng.actions import check_action, legal_actions
from qimeng.device import DEVICES
from qimeng.envs.workers.compile import Compilers, job_of
from qimeng.envs.workers.shared_server import shared_server
from qimeng.interfaces import Action
from qimeng.program.program import Program
from tests.vocabulary.sparse.samples import CONTEXT, action_of, after, layer, reading, spec_of, start_of


def program_of(weights: str, rows: int) -> Program:
    start = start_of(spec_of(*layer(rows, 200, 100, torch.bfloat16), weights))
    return after(start, action_of(start, "sparsify"))


def stored(program: Program, param: str) -> Program:
    action = Action("storage", (reading(program).id,), param)
    assert action in legal_actions(program, CONTEXT)
    return after(program, action)


def refusal(program: Program, kind: str, param: str) -> str:
    with pytest.raises(IllegalAction) as error:
        check_action(program, Action(kind, (reading(program).id,), param), CONTEXT)
    return str(error.value)


def test_each_form_leads_to_the_others() -> None:
    program = program_of("csr:5", 24)
    assert "stored as csr already" in refusal(program, "storage", "csr")
    for form, other in (("ell", "balanced"), ("balanced", "csr")):
        program = stored(program, form)
        assert f"stored as {form} already" in refusal(program, "storage", form)
        assert Action("storage", (reading(program).id,), other) in legal_actions(program, CONTEXT)


def test_what_no_form_is_for_is_refused_with_the_numbers() -> None:
    assert "reads runs of 8 rows or more, or one row; these are 3" in refusal(program_of("csr:5", 3), "storage", "ell")
    assert "these are 5 of 28 blocks of 32 x 32" in refusal(program_of("bsr:32:20", 24), "storage", "ell")
    padded = stored(program_of("csr:5", 24), "ell")
    assert "padded to one length" in refusal(padded, "split", "more")


def test_padded_columns_are_made_once_of_the_kept_elements(golden: Callable[[str, str], None]) -> None:
    program = stored(program_of("csr:5", 24), "ell")
    made = program.implementation(reading(program))
    assert made.prepare and len(made.prepare_inputs) == 3
    golden("ell.py.txt", made.source)


def test_it_compiles_without_spills(tmp_path: Path) -> None:
    program = stored(program_of("csr:5", 72), "ell")
    region = reading(program)
    job = job_of(region, program.implementation(region))
    (found,) = Compilers(shared_server(), DEVICES["h200"], str(tmp_path), 2, 120.0).compile([job])
    assert found.error is None and all(k.spills == 0 for k in found.kernels)
