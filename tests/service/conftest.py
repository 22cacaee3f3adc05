"""The two servers that the end-to-end tests share, side by side on one machine."""

from collections.abc import Iterator

import pytest

from tests.service.server import Server, running


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model as `attend serve` serves it, in float32, where answers are the same to the bit."""
    with running(tmp_path_factory.mktemp("first") / "log", "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A second server beside the first, with two replicas and another name."""
    flags = ("--replicas", "2", "--served-model-name", "second", "--num-threads", "1")
    with running(tmp_path_factory.mktemp("second") / "log", "--dtype", "float32", *flags) as server:
        yield server
