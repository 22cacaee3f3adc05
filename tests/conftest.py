"""What holds for every test."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    """A second thread of torch ends with its test: two workers with two threads each are slow on two cores."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
