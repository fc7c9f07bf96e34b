"""Programs inside PyTorch: whole models, `torch.compile`, packages that need only torch and triton.

Deals in running programs where the user's own model runs. Knows nothing about how they are found or judged.
"""

from qimeng.integration.dispatch import FallbackWarning
from qimeng.integration.models import optimize
from qimeng.integration.record import PartReport, Record

__all__ = ["FallbackWarning", "PartReport", "Record", "optimize"]
