"""The names that a kernel's text may use: modules, their functions, built-ins, attributes.

Deals in dotted names. Allowed is only what a kernel needs: computing from tensors, and launching. Everything else is
refused, such as reading files, clocks, environments, other processes or addresses, keeping state between calls, random
numbers, and changes of settings or modules. Knows nothing about syntax.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from types import ModuleType

MODULES = frozenset(
    "torch torch.nn torch.nn.functional torch.special torch.linalg torch.fft torch.cuda torch.library torch.autograd "
    "triton triton.language triton.language.math triton.language.extra triton.language.extra.libdevice "
    "triton.language.extra.cuda triton.language.extra.cuda.libdevice triton.tools.tensor_descriptor "
    "math typing functools itertools operator collections collections.abc dataclasses enum numbers __future__".split()
)
"""What may be imported."""

BUILT_INS = frozenset(
    "abs all any bool bytes callable classmethod complex dict divmod enumerate filter float frozenset int isinstance "
    "issubclass iter len list map max min next object pow print property range repr reversed round set slice sorted "
    "staticmethod str sum super tuple type zip True False None NotImplemented Ellipsis ArithmeticError AssertionError "
    "AttributeError Exception IndexError KeyError LookupError NotImplementedError OverflowError RuntimeError "
    "StopIteration TypeError ValueError ZeroDivisionError".split()
)
"""`getattr` and `hasattr` with a constant name are read as attributes."""

_TORCH = (
    "Tensor Size device dtype layout memory_format finfo iinfo float float16 half bfloat16 float32 float64 double "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "int int8 int16 short int32 int64 long "
    "uint8 uint16 uint32 uint64 bool cfloat complex32 complex64 complex128 strided contiguous_format channels_last "
    "channels_last_3d preserve_format inf nan pi e no_grad autocast is_tensor is_floating_point is_complex tensor "
    "as_tensor broadcast_tensors broadcast_shapes einsum meshgrid split chunk stack cat vmap cdist "
    "norm unique unique_consecutive cartesian_prod block_diag atleast_1d atleast_2d atleast_3d tensordot stft istft lu "
    "chain_matmul"
).split()
_CUDA = (
    "current_stream stream Stream device current_device get_device_properties get_device_capability is_available "
    "synchronize"
).split()
_LEAVES: dict[str, frozenset[str]] = {
    "torch.cuda": frozenset(_CUDA),
    "torch.library": frozenset({"custom_op", "triton_op", "wrap_triton", "register_fake"}),
    "torch.autograd": frozenset({"Function"}),
    "triton": frozenset({"jit", "autotune", "heuristics", "Config", "cdiv", "next_power_of_2", "set_allocator"}),
    "triton.language.PropagateNan": frozenset({"ALL", "NONE"}),
    "triton.tools.tensor_descriptor": frozenset({"TensorDescriptor"}),
    "functools": frozenset({"partial", "reduce"}),
    "collections": frozenset({"namedtuple", "OrderedDict", "defaultdict", "deque", "Counter"}),
    "dataclasses": frozenset({"dataclass", "field", "replace"}),
    "enum": frozenset({"Enum", "IntEnum", "auto"}),
    "typing": frozenset(
        "Any Callable ClassVar Final Generic Iterable Iterator List Literal Mapping NamedTuple Optional Sequence Tuple "
        "Dict Set TypeAlias TypeVar Union cast".split()
    ),
    "operator": frozenset(
        "abs add and_ eq floordiv ge getitem gt index inv invert itemgetter le lshift lt matmul mod mul ne neg not_ "
        "or_ "
        "pos pow rshift sub truediv xor".split()
    ),
    "numbers": frozenset({"Number", "Integral", "Real"}),
    "__future__": frozenset({"annotations"}),
}
_OPEN = ("math", "itertools", "collections.abc", "torch.special", "torch.linalg", "torch.fft", "torch.nn.functional")
"""Modules of which every public function may be used, but for `_NOT`."""
_LANGUAGE = (
    "triton.language",
    "triton.language.math",
    "triton.language.extra.libdevice",
    "triton.language.extra.cuda",
    "triton.language.extra.cuda.libdevice",
)
"""The same of Triton's, which is not loaded here; `_PARTS` are modules in them."""
_PARTS = frozenset("core standard random semantic target_info extra math cuda hip libdevice utils gdc".split())
_MORE = frozenset("itemsize is_floating_point is_signed is_complex primitive_bitwidth min max eps tiny value".split())
"""What a dtype may be asked for."""
CUDA_FUNCTIONS = frozenset({"cuda_kernel", "cuda_aligned"})
"""What a text in CUDA C++ finds defined, beside `torch` (`qimeng.backend.cuda_runtime`)."""
_CHAINS = frozenset({"triton.runtime.driver.active.utils.get_device_properties"})
_PRIVATE_OPERATORS = frozenset(
    "_scaled_mm _int_mm _grouped_mm _scaled_grouped_mm _addmm_activation _weight_int8pack_mm _weight_int4pack_mm "
    "_softmax _log_softmax _unsafe_view".split()
)

_RANDOM = re.compile(
    r"^(rand|randn|randint|randperm|normal|bernoulli|multinomial|poisson|binomial|dropout|alpha_dropout|"
    r"feature_dropout|feature_alpha_dropout|native_dropout|rrelu|fractional_max_pool\w*|gumbel_softmax|randint4x|rand4x|"
    r"randn4x|philox\w*|seed|manual_seed|initial_seed)(_like)?_?$|"
    r"^(random|uniform|cauchy|exponential|geometric|log_normal)_$"
)
_NOT = frozenset(
    "from_file frombuffer from_numpy set_ resize_ resize_as_ handle_torch_function has_torch_function "
    "globaltimer smid clock num_warps_of has_torch_function_unary has_torch_function_variadic boolean_dispatch "
    "assert_int_or_pair importlib warnings os sys pointer_type".split()
)
ATTRIBUTES_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        "data_ptr const_data_ptr untyped_storage storage storage_offset cuda_stream stream_id is_shared "
        "is_pinned".split(),
        "tells where memory is, which is used again for other content",
    ),
    **dict.fromkeys(
        "cache_info cache_clear cache_parameters cache device_caches configs best_config nargs kwargs all_kwargs fn "
        "pre_hook post_hook used_global_vals".split(),
        "tells of earlier calls, or can keep what they made",
    ),
    **dict.fromkeys(
        "numpy share_memory_ set_ resize_ resize_as_ as_subclass swap_ requires_grad_ backward".split(),
        "changes what a tensor is",
    ),
    **dict.fromkeys("grad grad_fn is_leaf is_inference requires_grad".split(), "tells who calls"),
    **dict.fromkeys(
        "f_back f_globals f_locals f_builtins f_code tb_frame tb_next gi_frame cr_frame ag_frame gi_code mro "
        "with_traceback".split(),
        "looks into the interpreter",
    ),
    **dict.fromkeys(
        "register_hook register_forward_hook register_forward_pre_hook register_full_backward_hook "
        "register_post_accumulate_grad_hook register_module_forward_hook register_kernel "
        "register_torch_dispatch".split(),
        "asks to be called back",
    ),
    **dict.fromkeys(("elapsed_time", "record_event", "query"), "tells the time or what others do"),
    **dict.fromkeys(("knobs", "utils", "testing", "compiler", "backends", "ops_module"), "is no part of a kernel"),
}
"""Attributes that no object may be asked for; nor for private ones."""

DUNDERS = frozenset(
    {"__init__", "__post_init__", "__call__", "__len__", "__getitem__", "__iter__", "__eq__", "__name__"}
)

CHANGES = frozenset(
    "append extend insert pop popitem remove clear update setdefault add discard appendleft popleft extendleft rotate "
    "sort reverse subtract move_to_end intersection_update difference_update symmetric_difference_update".split()
)
"""Methods that change a list, a table or a set."""

READS = frozenset({"get", "keys", "values", "items", "index", "count"})
"""Methods that only read one."""

ASM_STATE = re.compile(r"%(globaltimer|clock|n?smid|n?warpid|gridid|envreg|pm\d)|\b(ld|st|atom|red|call|trap|exit)\b")
"""What inline assembly may not read: registers that tell time or place, and memory by address."""


def is_module(name: str) -> bool:
    """Whether a dotted name is a module, or a part of one that only holds names."""
    return (
        name in MODULES
        or any(m.startswith(name + ".") for m in MODULES)
        or (any(c.startswith(name + ".") for c in (*_CHAINS, "torch.ops.aten.x")))
    )


def is_random(name: str) -> bool:
    """Whether a function or method of that name draws random numbers."""
    return _RANDOM.match(name) is not None


def may_import(module: str) -> bool:
    """Whether a text may import `module`.

    >>> may_import("math"), may_import("os"), may_import("torch.utils.cpp_extension")
    (True, False, False)
    """
    return module in MODULES


def may_use(name: str) -> bool:
    """Whether a text may use what the dotted name `name`, in a module that it may import, stands for.

    >>> may_use("torch.matmul"), may_use("torch.load"), may_use("triton.language.dot"), may_use("torch.rand")
    (True, False, True, False)
    """
    home, _, last = name.rpartition(".")
    if name in _CHAINS or name in CUDA_FUNCTIONS:
        return True
    if is_random(last) or last in _NOT:
        return False
    if last.startswith("_"):
        return last in _PRIVATE_OPERATORS and home in ("torch", "torch.ops.aten")
    if home in _LEAVES:
        return last in _LEAVES[home]
    if home == "torch.Tensor":
        return last not in ATTRIBUTES_REFUSED
    if last in _MORE and not is_module(home):
        return may_use(home) and home.startswith(("torch.", "triton.language.")) and home.count(".") < 3
    if home == "torch":
        return last in _TORCH or last in _operators()
    if home == "torch.nn":
        return last[:1].isupper()
    if home.startswith("torch.ops.aten"):
        return not last.startswith("set")
    if home in _LANGUAGE:
        return last not in _PARTS
    return home in _OPEN and last in _functions(home)


@lru_cache(16)
def _functions(module: str) -> frozenset[str]:
    """The public names of a module that are no modules."""
    items = vars(import_module(module)).items()
    return frozenset(n for n, item in items if n[:1] != "_" and not isinstance(item, ModuleType))


@lru_cache(1)
def _operators() -> frozenset[str]:
    """Every function of `torch` that is an operator on tensors."""
    import torch

    return frozenset(n for n in dir(torch._C._VariableFunctions) if not n.startswith("_"))


__all__ = [
    "ASM_STATE",
    "ATTRIBUTES_REFUSED",
    "BUILT_INS",
    "CHANGES",
    "CUDA_FUNCTIONS",
    "DUNDERS",
    "READS",
    "is_module",
    "is_random",
    "may_import",
    "may_use",
]
