"""How the threads of PyTorch's CPU operators wait for one another in processes that this package starts.

OpenMP's threads spin while they wait, unless a variable says otherwise before PyTorch is imported. On a machine whose
cores others use as well, the thread that they wait for does not run meanwhile. Deals in that variable. Knows nothing
about processes.
"""

from __future__ import annotations

from collections.abc import Mapping

VARIABLE, ASLEEP = "OMP_WAIT_POLICY", "PASSIVE"


def waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable: what `environment` says, or else that threads sleep.

    >>> waiting({})
    {'OMP_WAIT_POLICY': 'PASSIVE'}
    >>> waiting({"OMP_WAIT_POLICY": "ACTIVE"})
    {'OMP_WAIT_POLICY': 'ACTIVE'}
    """
    return {VARIABLE: environment.get(VARIABLE, ASLEEP)}


__all__ = ["ASLEEP", "VARIABLE", "waiting"]
