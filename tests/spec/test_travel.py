"""Specs of modules whose code lies in several files of the user's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from qimeng import KernelSpec
from qimeng.spec.travel import pack, pack_module, unpack

HELPERS = """
def factor():
    return 3.0

def scaled(x):
    return x * factor()

def block():
    return 2.0
"""
MODEL = """
import torch
import {name}_more as more
from {name}_helpers import scaled

class Model(torch.nn.Module):
    def forward(self, x):
        return scaled(x) + more.block()
"""


@pytest.mark.parametrize("with_unpicklable", [False, True])
def test_what_the_users_own_files_import_from_each_other_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_unpicklable: bool
) -> None:
    """A worker in a sandbox can read none of these files."""
    name = f"travels_{with_unpicklable}"
    (tmp_path / f"{name}_helpers.py").write_text(HELPERS)
    (tmp_path / f"{name}_more.py").write_text(HELPERS + "lock = (x for x in ())\n" * with_unpicklable)
    (tmp_path / f"{name}.py").write_text(MODEL.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name).Model()
    x = torch.ones(2)
    packed = [pack(KernelSpec.of(module, (x,))), pack_module(module, None)]
    if not with_unpicklable:  # else that file is left to be imported
        monkeypatch.undo()
        for key in [k for k in sys.modules if k.startswith(name)]:
            monkeypatch.delitem(sys.modules, key)
    spec, (other, _) = map(unpack, packed)
    assert spec.module()(x).tolist() == other(x).tolist() == [5.0, 5.0]
