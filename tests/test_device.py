"""Devices as data: what a row offers is declared, and nobody infers a vendor from the type of a field."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from qimeng.device import CAPABILITIES, DEVICES, capabilities_of, device_named
from qimeng.errors import DeviceError

PACKAGE = Path(__file__).resolve().parent.parent / "qimeng"


def test_every_row_declares_what_it_offers() -> None:
    for row in DEVICES.values():
        assert row.kind in ("cuda", "hip")
        assert row.capabilities == capabilities_of(row.kind, row.arch) and set(row.capabilities) <= CAPABILITIES.keys()
    assert device_named("h200").has("warpgroup") and not device_named("l40s").has("descriptors")
    assert device_named("l40s").has("fp8") and not device_named("a100").has("fp8")
    assert not device_named("mi300x").has("approximate") and device_named("mi300x").has("fp8")
    assert [device_named(n).target for n in ("h100", "mi300x")] == ["sm_90", "gfx942"]


def test_rates_of_8_bits_are_those_of_half_types_where_nothing_is_said() -> None:
    h200 = device_named("h200")
    assert h200.peak_tflops("int8") == h200.peak_tflops("float8_e4m3fn") == 1979 > h200.peak_tflops("bfloat16")
    assert replace(h200, byte_tflops=0).byte_tflops == h200.half_tflops


def test_an_unknown_capability_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(DeviceError, match=r"unknown capability 'wings'; known: approximate, "):
        device_named("h200").has("wings")


def test_an_unknown_architecture_offers_what_its_generation_has() -> None:
    assert capabilities_of("cuda", 86) == ("approximate", "bf16")
    assert "warpgroup" in capabilities_of("cuda", 103) and "warpgroup" not in capabilities_of("cuda", 120)
    assert capabilities_of("hip", "gfx000") == ()


def test_nobody_takes_an_integer_for_a_vendor() -> None:
    pattern = re.compile(r"isinstance\([\w.]*\barch\b")
    assert not [str(p) for p in PACKAGE.rglob("*.py") if pattern.search(p.read_text())]
