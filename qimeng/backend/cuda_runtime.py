"""Compiling and launching CUDA C++ at run time: what a program's CUDA regions call.

The text below the imports is also copied into every emitted program that has a CUDA region, so that it stands alone: it
uses torch, and of NVIDIA's packages `cuda-bindings` and NVRTC, both of which PyTorch's CUDA wheels bring. Deals in one
kernel at a time. Knows nothing about regions or about judging.
"""

import ctypes
import functools
import os
import re

import torch

__all__ = ["CudaError", "CudaKernel", "cuda_aligned", "cuda_compile", "cuda_kernel", "find_nvrtc", "nvrtc_version"]


def find_nvrtc() -> None:
    """Load NVRTC and the headers it needs, once.

    Raises:
        CudaError: they are not there.
    """
    _nvrtc()


def nvrtc_version() -> str:
    """Such as ``"13.0"``.

    Raises:
        CudaError: it is not there.
    """
    return ".".join(map(str, _checked(_nvrtc().nvrtcVersion())))


# ---- CUDA C++: compiled by NVRTC at the first launch, launched through the driver on the current stream

_SCALARS = {
    "bool": ctypes.c_bool, "char": ctypes.c_int8, "signed char": ctypes.c_int8, "unsigned char": ctypes.c_uint8,
    "short": ctypes.c_int16, "unsigned short": ctypes.c_uint16, "int": ctypes.c_int32, "unsigned": ctypes.c_uint32,
    "unsigned int": ctypes.c_uint32, "long": ctypes.c_int64, "unsigned long": ctypes.c_uint64,
    "long long": ctypes.c_int64, "unsigned long long": ctypes.c_uint64, "size_t": ctypes.c_uint64,
    "float": ctypes.c_float, "double": ctypes.c_double,
}  # fmt: skip
_POINTERS = {
    "float": "float32", "double": "float64", "half": "float16", "__half": "float16", "bfloat16": "bfloat16",
    "__nv_bfloat16": "bfloat16", "nv_bfloat16": "bfloat16", "int": "int32", "short": "int16", "signed char": "int8",
    "long": "int64", "long long": "int64",
}  # fmt: skip


class CudaError(RuntimeError):
    """CUDA C++ that does not compile, or a call of the driver that failed."""


def cuda_kernel(source, name):
    """The kernel `name` of a CUDA C++ text; ``kernel[grid, block](*arguments, shared=0)`` launches it.

    Args:
        source: CUDA C++, which may include cuda_fp16.h, cuda_bf16.h and other headers of the device.
        name: of a ``__global__`` function; template arguments may follow it (``"scale<float>"``).

    Returns:
        An object to be indexed by the grid (blocks) and the block (threads), each a number or up to three of them, and
        then called with tensors, for parameters that are pointers, and numbers; `shared` is bytes of dynamic shared
        memory. It is compiled for the GPU at hand at its first launch and kept; later launches can be captured in a
        CUDA graph.
    """
    return CudaKernel(source, name)


def cuda_aligned(*tensors, bytes=16):
    """Whether the memory of every tensor begins at a multiple of `bytes`, so that a thread may read so many at once."""
    return all([t.data_ptr() % bytes == 0 for t in tensors])


class CudaKernel:
    """See `cuda_kernel`."""

    def __init__(self, source, name):
        self.source, self.name, self._functions, self._granted = source, name, {}, {}
        self.parameters = _parameters(source, name)

    def __getitem__(self, shape):
        """What launches the kernel with this grid and block."""
        grid, block = shape
        return functools.partial(self.launch, _triple(grid), _triple(block))

    def launch(self, grid, block, *arguments, shared=0):
        """Launch the kernel on the current stream of the device that its tensors are on."""
        values, types = self.bind(arguments)
        devices = {a.device for a in arguments if isinstance(a, torch.Tensor)}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            found = ", ".join(sorted(map(str, devices))) or "none"
            raise ValueError(f"kernel {self.name}: its tensors have to be on one GPU, they are on {found}")
        device = devices.pop()
        driver, stream = _driver(), torch.cuda.current_stream(device).cuda_stream
        with torch.cuda.device(device):
            _enter_context(driver, device)
            function = self._functions.get(device.index)
            if function is None:
                function = self._functions[device.index] = self._load(driver, device)
            if shared > self._granted.get(device.index, 48 << 10):  # more has to be asked for, once
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _checked(driver.cuFuncSetAttribute(function, attribute, shared))
                self._granted[device.index] = shared
            (error,) = driver.cuLaunchKernel(function, *grid, *block, shared, stream, (values, types), 0)
        if error:
            raise CudaError(f"kernel {self.name}, grid {grid}, block {block}, {shared} B shared: {_reason(error)}")

    def bind(self, arguments):
        """Values and C types of the arguments of a launch.

        Raises:
            ValueError: they are not what the kernel's parameters ask for.
        """
        if len(arguments) != len(self.parameters):
            raise ValueError(f"kernel {self.name} has {len(self.parameters)} parameters, got {len(arguments)}")
        values, types = [], []
        for value, (kind, pointer, name) in zip(arguments, self.parameters, strict=True):
            where = f"kernel {self.name}, parameter {name}"
            if pointer != isinstance(value, torch.Tensor):
                raise ValueError(f"{where}: expected {'a tensor' if pointer else kind}, got {type(value).__name__}")
            if not pointer:
                integer = _SCALARS[kind] not in (ctypes.c_float, ctypes.c_double)
                if not isinstance(value, (int, float)) or (integer and int(value) != value):
                    raise ValueError(f"{where}: expected {kind}, got {value!r}")
                values.append(int(value) if integer else float(value))
                types.append(_SCALARS[kind])
                continue
            wanted = _POINTERS.get(kind)
            if wanted is not None and value.dtype is not getattr(torch, wanted):
                raise ValueError(f"{where}: a pointer to {kind}, got a tensor of {value.dtype}")
            values.append(0 if value.is_meta else value.data_ptr())
            types.append(ctypes.c_void_p)
        return tuple(values), tuple(types)

    def _load(self, driver, device):
        """The driver's function, compiled for `device`; its module stays loaded as long as the process lives."""
        major, minor = torch.cuda.get_device_capability(device)
        binary, _, names = cuda_compile(self.source, (self.name,), f"sm_{major}{minor}")
        module = _checked(driver.cuModuleLoadData(binary))
        return _checked(driver.cuModuleGetFunction(module, names[self.name].encode()))


def cuda_compile(source, names, architecture):
    """Compile CUDA C++ with NVRTC, which needs no GPU.

    IEEE arithmetic: division and square roots rounded to nearest, subnormal numbers kept; a product and a sum may
    become one fused multiply-add, as in PyTorch's own kernels.

    Args:
        source: the text.
        names: the kernels in it that are wanted.
        architecture: such as ``"sm_90"``.

    Returns:
        The binary, its PTX, and the name of each kernel in the binary.

    Raises:
        CudaError: it does not compile; the message has the line.
    """
    nvrtc = _nvrtc()
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []), nvrtc)
    for name in names:
        _checked(nvrtc.nvrtcAddNameExpression(program, name.encode()), nvrtc)
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--fmad=true", "--ftz=false", "--prec-div=true"]
    options += ["--prec-sqrt=true", *(f"--include-path={folder}" for folder in _include_folders())]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    try:
        if error:
            log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program), nvrtc))
            _checked(nvrtc.nvrtcGetProgramLog(program, log), nvrtc)
            text = log.decode(errors="replace").rstrip("\0\n ") or nvrtc.nvrtcGetErrorString(error)[1].decode()
            raise CudaError(text)
        binary, ptx = [
            bytes(_checked(size(program), nvrtc)) for size in (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetPTXSize)
        ]
        _checked(nvrtc.nvrtcGetCUBIN(program, binary), nvrtc)
        _checked(nvrtc.nvrtcGetPTX(program, ptx), nvrtc)
        lowered = {n: _checked(nvrtc.nvrtcGetLoweredName(program, n.encode()), nvrtc).decode() for n in names}
        return binary, ptx.decode(errors="replace").rstrip("\0"), lowered
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _parameters(source, name):
    """(C type without const, whether it is a pointer, name) of each parameter of a kernel."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)
    base = re.escape(name.partition("<")[0])
    found = re.search(r"__global__\b[^;{}]*?\b" + base + r"\s*\(([^()]*)\)", text)
    if found is None:
        raise ValueError(f"the CUDA text has no kernel `__global__ void {name}(…)`")
    out = []
    for part in filter(None, (p.strip() for p in found[1].split(","))):
        words = [w for w in re.findall(r"\w+|\*", part) if w not in ("const", "__restrict__", "restrict", "volatile")]
        pointer = "*" in words
        kind = " ".join(w for w in words[:-1] if w != "*")
        if words.count("*") > 1 or "&" in part or "[" in part or (not pointer and kind not in _SCALARS):
            known = ", ".join(_SCALARS)
            raise ValueError(f"kernel {name}, parameter {part!r}: write a pointer, or one of {known}")
        out.append((kind, pointer, words[-1]))
    return tuple(out)


def _enter_context(driver, device):
    """Make PyTorch's context of the device this thread's, where the thread has none yet."""
    if not int(_checked(driver.cuCtxGetCurrent())):
        _checked(driver.cuCtxSetCurrent(_checked(driver.cuDevicePrimaryCtxRetain(device.index))))


def _triple(size):
    """A grid or block as three numbers."""
    sizes = (size,) if isinstance(size, int) else tuple(size)
    if not 1 <= len(sizes) <= 3 or any(not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(f"a grid and a block are one to three positive whole numbers, got {size!r}")
    return (*sizes, 1, 1)[:3]


@functools.lru_cache(1)
def _include_folders():
    """Folders of CUDA's headers for the device: in Triton's package, in NVIDIA's, in a toolkit."""
    import importlib.util
    import sysconfig

    places = [os.path.join(sysconfig.get_paths()["purelib"], "nvidia", n, "include") for n in ("cu13", "cuda_runtime")]
    places.append(os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include"))
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin:
        places.insert(0, os.path.join(os.path.dirname(triton.origin), "backends", "nvidia", "include"))
    return tuple([p for p in places if os.path.isfile(os.path.join(p, "cuda_fp16.h"))][:1])


def _nvrtc():
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise CudaError(_MISSING.format(error)) from error
    return nvrtc


def _driver():
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaError(_MISSING.format(error)) from error
    return driver


_MISSING = (
    "CUDA C++ kernels need NVIDIA's packages cuda-bindings and nvidia-cuda-nvrtc ({}): "
    "pip install 'cuda-bindings>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'"
)


def _checked(result, library=None):
    """What a call of the driver or of NVRTC returned beside its status."""
    error, *values = result
    if error:
        raise CudaError(_reason(error) if library is None else library.nvrtcGetErrorString(error)[1].decode())
    return values[0] if len(values) == 1 else values


def _reason(error):
    status, text = _driver().cuGetErrorString(error)
    return str(error) if status else text.decode()
