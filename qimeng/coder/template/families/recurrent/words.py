"""What rule-based planners and prompts say about the recurrent family.

Deals in names of actions. Knows nothing about kernels.
"""

from __future__ import annotations

INTENTS = (("split", "fewer"), ("split", "more"), ("pipeline", "warps"), ("tiling", "taller"), ("tiling", "smaller"))
"""What to try, in order."""

__all__ = ["INTENTS"]
