"""`qimeng doctor`: what works on this machine, and whether kernels here compute what they must.

Deals in checks. Knows nothing about programs, searches or results.
"""

from qimeng.doctor.check import Check
from qimeng.doctor.machine import checks

__all__ = ["Check", "checks"]
