"""The harm beside a soak: on a real server each kind ends as it must, and one that does not is found."""

import threading
from collections import Counter

import pytest

from loadtest import troubles
from loadtest.faults.target import wait_for
from loadtest.inside.sitecustomize import POISON, is_poisoned
from loadtest.soak import sample, start_watched
from loadtest.troubles import TROUBLES, TroubleCounts, trouble


@pytest.mark.ray
def test_each_harm_ends_as_it_must_on_a_server_that_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(troubles, "EVERY", 0.0)
    over, found = threading.Event(), TroubleCounts(Counter(), Counter())
    with start_watched(("--single",), tmp_path) as target:
        thread = threading.Thread(target=lambda: troubles.asyncio.run(trouble(target, over, found)))
        thread.start()
        wait_for(lambda: found.as_expected.keys() == TROUBLES.keys() or found.otherwise, 60)
        over.set()
        thread.join()
        assert found.good, found
        assert wait_for(lambda: sample(target, tmp_path, 0.0).blocks == 0, 10)
        assert sample(target, tmp_path, 0.0).tasks > 0


@pytest.mark.parametrize(("tokens", "wanted"), [([1, *POISON, 2], True), ([*POISON[:-1], 2], False), ([], False)])
def test_poison_is_found_in_a_step(tokens, wanted):
    assert is_poisoned(tokens) is wanted
