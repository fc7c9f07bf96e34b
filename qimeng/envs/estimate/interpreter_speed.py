"""Triton's interpreter without work that it does again at every operation.

An operation on a small tile costs the interpreter far more in types, shapes and patches of its language than in numpy.
Here the language is patched once, equal types and shapes are made once, and no check is computed that says nothing.
Results and errors stay as they are. Knows nothing about what is computed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from qimeng.envs.estimate.interpreter_rewriting import rewrite_quickly


def quicken() -> None:
    """Patch the language for as long as this process lives, and keep types, shapes and dtypes that were made.

    A version of Triton whose interpreter has other parts is left as it is.
    """
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    parts = "_patch_attr", "_patch_lang", "_LangPatchScope", "interpreter_semantic", "_get_np_dtype", "FunctionRewriter"
    checks = "broadcast_impl_value", "binary_op_sanitize_overflow_impl", "binary_op_type_checking_impl"
    if not all(hasattr(interpreter, p) for p in parts) or not all(hasattr(TritonSemantic, c) for c in checks):
        return
    _keep_types()
    _check_no_sums_in_vain()
    _match_equal_types()
    _patch_once()
    rewrite_quickly()


def _patch_once() -> None:
    """The interpreter looks through the whole language at every launch and at every call of a device function."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_attr = _call_with_semantic
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


def _call_with_semantic(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    if getattr(member, "__triton_builtin__", False):  # a function that only asks for the semantic before it calls
        member = getattr(member, "__wrapped__", member)

    def call(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return member(*args, **options)

    scope.set_attr(owner, name, call)


def _keep_types() -> None:
    """Equal types have equal attributes; so have tensors of one type, but for their handle."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    of_blocks: dict[Any, dict[str, Any]] = {}
    of_tensors: dict[Any, dict[str, Any]] = {}
    of_numpy: dict[Any, Any] = {}
    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    numpy_dtype, broadcast = interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
        key = element_ty.name, _space(element_ty), sizes
        if key not in of_blocks:
            make_block(self, element_ty, shape)
            of_blocks[key] = dict(vars(self))
        vars(self).update(of_blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.name, _space(type.scalar)
        if key not in of_tensors:
            make_tensor(self, handle, type)
            of_tensors[key] = dict(vars(self))
        vars(self).update(of_tensors[key])
        self.handle = handle

    def numpy_of(type: Any) -> Any:
        name = type.scalar.name
        if name not in of_numpy:
            of_numpy[name] = numpy_dtype(type)
        return of_numpy[name]

    def spread(self: Any, left: Any, right: Any) -> Any:
        blocks = left.type.is_block() and right.type.is_block()
        return (
            (left, right)
            if blocks and left.type.shape.values == right.type.shape.values
            else broadcast(self, left, right)
        )

    tl.block_type.__init__, tl.tensor.__init__ = block, tensor
    interpreter._get_np_dtype, TritonSemantic.broadcast_impl_value = numpy_of, spread


def _space(element: Any) -> int:
    """The address space of a pointer, which its name does not have."""
    return getattr(element, "address_space", 0)


def _check_no_sums_in_vain() -> None:
    """The interpreter computes sums of whole numbers twice to see that they fit, and says so under debug only."""
    from triton.language.semantic import TritonSemantic

    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def checked(self: Any, left: Any, right: Any, operation: Any) -> None:
        if self.builder.options.debug:
            check(self, left, right, operation)

    TritonSemantic.binary_op_sanitize_overflow_impl = checked


def _match_equal_types() -> None:
    """Operands of one type need no conversion; nor does a number that is small enough beside a type that has it."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    convert, whole, real = TritonSemantic.binary_op_type_checking_impl, (tl.int32, tl.int64), tl.float32

    def same(left: Any, right: Any) -> bool:
        return left.type.name == right.type.name and not left.type.scalar.is_ptr()

    def fits(number: Any, beside: Any) -> bool:
        scalar = beside.type.scalar
        if type(number) is int:
            return -(2**31) <= number < 2**31 and (scalar in whole or scalar == real)
        return type(number) is float and scalar == real

    def match(
        self: Any,
        left: Any,
        right: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        tensors = type(left) is tl.tensor, type(right) is tl.tensor
        if tensors == (True, True) and not div_or_mod and same(left, right):
            return left, right
        if arithmetic_check and tensors == (True, False) and fits(right, left):
            return self.broadcast_impl_value(left, self.scalar_constant(right, left.type.scalar))
        if arithmetic_check and tensors == (False, True) and fits(left, right):
            return self.broadcast_impl_value(self.scalar_constant(left, right.type.scalar), right)
        return convert(self, left, right, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    TritonSemantic.binary_op_type_checking_impl = match


__all__ = ["quicken"]
