"""One instruction set of the native decoder after the other."""

import pytest

from model.net.native import library


@pytest.fixture(params=range(5), ids=library.VARIANTS)
def variant(request):
    """One variant after the other, as far as this CPU has them."""
    built = library.load()
    best = built.attend_best()
    if request.param > best:
        pytest.skip(f"this CPU has no {library.VARIANTS[request.param]}")
    built.attend_choose(request.param)
    yield library.VARIANTS[request.param]
    built.attend_choose(best)
