"""The log tells what the time of a load went to."""

import logging

from attend.model.engine.laps import Laps


def test_one_line_tells_reading_unpacking_and_the_cache_apart(caplog):
    times, reported = iter([10.0, 11.0, 11.5, 14.0, 14.5]), []
    laps = Laps(lambda *sizes: reported.append(sizes), lambda: next(times))
    laps.report(1_000_000_000, 2_000_000_000)
    laps.end("weights")
    laps.end("cache")
    laps.report(2_000_000_000, 2_000_000_000)
    laps.end("weights")
    laps.end("cache")
    with caplog.at_level(logging.INFO, "attend.engine"):
        laps.tell(0.5, 3_000_000_000)
    assert reported == [(1_000_000_000, 2_000_000_000), (2_000_000_000, 2_000_000_000)]
    told = "Loaded 2.00 GB in 3.5 s (571 MB/s): 0.5 s to read files, 3.0 s to unpack weights; 1.0 s for a KV cache of 3.0 GB"
    assert caplog.messages == [told]
