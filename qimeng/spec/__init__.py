"""What to compute: `KernelSpec`."""

from qimeng.spec.inputs import DISTRIBUTIONS, infer_domain, perturb_parameters
from qimeng.spec.spec import DTYPES, MODES, KernelSpec

__all__ = ["DISTRIBUTIONS", "DTYPES", "MODES", "KernelSpec", "infer_domain", "perturb_parameters"]
