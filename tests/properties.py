"""How properties are tested: on the same examples every time, however slow the machine is."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

PROPERTY = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

__all__ = ["PROPERTY"]
