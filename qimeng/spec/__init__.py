"""What to compute: `KernelSpec` and the values its inputs and parameters take in trials."""

from qimeng.spec.distributions import DISTRIBUTIONS, EXAMPLES, applies
from qimeng.spec.leaf import DOMAINS, infer_domain
from qimeng.spec.perturb import perturb_parameters
from qimeng.spec.spec import DTYPES, MODES, KernelSpec, Tolerances, check_mode

__all__ = [
    "DISTRIBUTIONS",
    "DOMAINS",
    "DTYPES",
    "EXAMPLES",
    "MODES",
    "KernelSpec",
    "Tolerances",
    "applies",
    "check_mode",
    "infer_domain",
    "perturb_parameters",
]
