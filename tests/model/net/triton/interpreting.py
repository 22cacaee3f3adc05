"""A plugin of pytest for laws that run in Triton's interpreter: `-p tests.model.net.triton.interpreting`.

The interpreter patches Triton's language at every call of a function: it is done once for all. It looks at every product of
integers for an overflow, which tiny tensors do not have, and makes the same table of types anew for every operation: it does
not. So the laws take a third of the time. It cuts bfloat16 off: it is rounded to the nearest, as a GPU rounds it. OpenBLAS sums
a row in another order where it stands elsewhere in its matrix, on some CPUs: products are summed in float64, and rounded.
"""

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from attend.model.net.triton.backend import INTERPRETED


@pytest.fixture(scope="session", autouse=True)
def interpreter_set_up():
    if not INTERPRETED:
        yield
        return
    both = FunctionType((lambda: None).__code__, {"tl": triton.language, "core": triton.language.core})
    with pytest.MonkeyPatch.context() as patch:
        scope = interpreter._patch_lang(both)
        patch.setattr(interpreter, "_patch_lang", lambda function: SimpleNamespace(restore=lambda: None))
        patch.setattr(interpreter, "_convert_float", convert)
        patch.setattr(interpreter, "_get_np_dtype", known_types(interpreter._get_np_dtype))
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        patch.setattr(builder, "create_dot", in_double(builder.create_dot))
        yield
        scope.restore()


def known_types(look_up: Callable[[tl.dtype], np.dtype]) -> Callable[[tl.dtype], np.dtype]:
    """The same function, which looks each type up once."""
    known: dict[str, np.dtype] = {}

    def known_type(given: tl.dtype) -> np.dtype:
        name = "pointer" if given.scalar.is_ptr() else given.scalar.name
        if name not in known:
            known[name] = look_up(given.scalar)
        return known[name]

    return known_type


def convert(numbers: np.ndarray, given: tl.dtype, wanted: tl.dtype, rounding: object) -> np.ndarray:
    """The bits of float32 numbers as bfloat16, or those of bfloat16 as float32."""
    if wanted == tl.float32:
        assert given == tl.bfloat16
        return numbers.astype(np.uint32) << 16
    assert (given, wanted) == (tl.float32, tl.bfloat16)
    return torch.tensor(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)


def in_double(product: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """The same function; what it adds up of float32 numbers is rounded once."""

    def summed(left: TensorHandle, right: TensorHandle, added: TensorHandle, *more: object) -> TensorHandle:
        if left.data.dtype != np.float32:
            return product(left, right, added, *more)
        sums = np.matmul(left.data, right.data, dtype=np.float64).astype(np.float32)
        return TensorHandle(sums + added.data, added.dtype.scalar)

    return summed
