"""The harm beside a soak: on a real server each kind ends as it must."""

import threading
from collections import Counter

import pytest

from loadtest import troubles
from loadtest.faults.target import running, wait_for
from loadtest.soak import sample
from loadtest.troubles import TROUBLES, TroubleCounts, trouble


@pytest.mark.ray
def test_each_harm_ends_as_it_must_on_a_server_that_goes_on(monkeypatch):
    monkeypatch.setattr(troubles, "EVERY", 0.0)
    over, found = threading.Event(), TroubleCounts(Counter(), Counter())
    with running(("--single",)) as target:
        thread = threading.Thread(target=lambda: troubles.asyncio.run(trouble(target, over, found)))
        thread.start()
        wait_for(lambda: found.as_expected.keys() == TROUBLES.keys() or found.otherwise, 60)
        over.set()
        thread.join()
        assert found.good, found
        assert wait_for(lambda: sample(target, 0.0).blocks == 0, 10)
