"""Where the ranks of GPUs find each other."""

import os
from types import SimpleNamespace

import pytest

from attend.model.parallel import group as under_test
from attend.model.parallel.group import ProcessGroup


@pytest.mark.parametrize(("given", "wanted"), [(None, "=lo"), ("eth0", "eth0")])
def test_ranks_of_gpus_find_each_other_on_the_loopback_interface(given, wanted, monkeypatch):
    """All live on one node, as those of CPUs, which exchange over 127.0.0.1; what the user has set stays."""
    seen = []
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    made = SimpleNamespace(**{name: getattr(under_test.c10d, name) for name in ("TCPStore", "PrefixStore", "ProcessGroupGloo")})
    made.ProcessGroupNCCL = lambda *args: seen.append(os.environ["NCCL_SOCKET_IFNAME"])
    monkeypatch.setattr(under_test, "c10d", made)
    ProcessGroup(0, 1, "cuda", late=5.0).connect()
    assert seen == [wanted]
