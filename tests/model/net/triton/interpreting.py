"""A plugin of pytest for laws that run in Triton's interpreter: `-p tests.model.net.triton.interpreting`.

The interpreter patches Triton's language at every call of a function: it is done once for all, and the laws take half the time.
It cuts bfloat16 off: it is rounded to the nearest, as a GPU rounds it.
"""

from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from model.net.triton.backend import INTERPRETED


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
        yield
        scope.restore()


def convert(numbers: np.ndarray, given: tl.dtype, wanted: tl.dtype, rounding: object) -> np.ndarray:
    """The bits of float32 numbers as bfloat16, or those of bfloat16 as float32."""
    if wanted == tl.float32:
        assert given == tl.bfloat16
        return numbers.astype(np.uint32) << 16
    assert (given, wanted) == (tl.float32, tl.bfloat16)
    return torch.tensor(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)
