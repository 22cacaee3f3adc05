"""What several tests of processes need."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def hangup_ends() -> Iterator[None]:
    """SIGHUP ends what is started meanwhile: under `nohup` these tests, and all that they start, would ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
