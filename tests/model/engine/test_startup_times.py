"""The log tells what the time of a load went to."""

import logging
from functools import partial

from attend.model.engine import build
from attend.model.engine.options import EngineOptions
from attend.model.engine.startup_times import StartupTimes
from attend.model.net.kv_cache import KVCache
from tests.model.checkpoints import write_checkpoint


def test_one_line_tells_reading_unpacking_and_the_cache_apart(caplog):
    times, reported = iter([10.0, 11.0, 11.5, 14.0, 14.5]), []
    startup_times = StartupTimes(lambda *sizes: reported.append(sizes), lambda: next(times))
    startup_times.report(1_000_000_000, 2_000_000_000)
    startup_times.end("weights")
    startup_times.end("cache")
    startup_times.report(2_000_000_000, 2_000_000_000)
    startup_times.end("weights")
    startup_times.end("cache")
    with caplog.at_level(logging.INFO, "attend.engine"):
        startup_times.log(0.5, 3_000_000_000)
    assert reported == [(1_000_000_000, 2_000_000_000), (2_000_000_000, 2_000_000_000)]
    told = "Loaded 2.00 GB in 3.5 s (571 MB/s): 0.5 s to read files, 3.0 s to unpack weights; 1.0 s for a KV cache of 3.0 GB"
    assert caplog.messages == [told]


def test_the_time_in_which_the_cache_is_made_counts_as_its_own(tmp_path, monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(build, "StartupTimes", partial(StartupTimes, clock=lambda: now[0]))
    allocate = KVCache.allocate

    def slow(*arguments):
        now[0] += 7.0
        return allocate(*arguments)

    monkeypatch.setattr(KVCache, "allocate", slow)
    options = EngineOptions(device="cpu", dtype="float32", num_threads=1, max_model_len=64, kv_cache_memory=1 << 24)
    with caplog.at_level(logging.INFO, "attend.engine"):
        build.build_engine(write_checkpoint("llama", tmp_path), options)
    [line] = [line for line in caplog.messages if line.startswith("Loaded")]
    assert "0.0 s to unpack weights; 7.0 s for a KV cache" in line
