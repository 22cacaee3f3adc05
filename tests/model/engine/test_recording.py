"""The thread that records steps is the thread that replays them: what a recording refers to may be kept for each thread."""

import asyncio
import threading
from dataclasses import replace

import pytest
import torch

from attend.model.backends.torch import Torch
from attend.model.engine.build import build_engine
from attend.model.engine.cuda_recorder import no_op
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.options import EngineOptions
from attend.model.engine.piecewise_graphs import PiecewiseGraphs
from attend.model.net.checkpoint import save
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.engine.machines import ask

OPTIONS = EngineOptions(device="cpu", dtype="float32", backend="torch", block_size=8, kv_cache_memory=1 << 20)


class Watched:
    """Records as on a CPU, and notes which thread records, and which replays."""

    def __init__(self):
        self.recorded, self.replayed = [], []

    def __call__(self, step):
        self.recorded.append(threading.current_thread().name)
        step(no_op)

        def replay(between=no_op):
            self.replayed.append(threading.current_thread().name)
            step(between)

        return replay

    def one_piece(self, step):
        return self(lambda between: step())

    @torch.inference_mode()
    def steps(self, backend, net, cache, config, *, is_sharded=False):
        """In place of a backend's `record`, which records nothing on a CPU."""
        graphs = DecodeGraphs(net, backend.attention, cache, config.max_model_len, 2, self.one_piece, scores=not is_sharded)
        return graphs, PiecewiseGraphs(net, backend.attention, cache, 16, self)


@pytest.fixture
def watched(monkeypatch):
    made = Watched()
    monkeypatch.setattr(Torch, "record", lambda backend, *given, **named: made.steps(backend, *given, **named))
    return made


@pytest.fixture
def engine(watched, tmp_path):
    save(tiny_decoder(tiny_config()), tmp_path, torch.float32)
    made = build_engine(tmp_path, OPTIONS)
    made.start()
    yield made
    made.close()


async def serve(engine):
    async for _ in engine.generate([ask("a", [5, 6, 7], 4)]):
        pass


def test_the_thread_that_replays_has_recorded(engine, watched):
    asyncio.run(serve(engine))
    assert engine.engine.runner.graphs is not None
    assert len(watched.recorded) == 3  # steps of one row and of two, and of 16 tokens in pieces
    assert set(watched.recorded) == set(watched.replayed)
    assert threading.current_thread().name not in watched.recorded
    assert len(watched.replayed) > 3


def test_a_recording_that_fails_ends_the_start_where_no_kernel_is_checked(monkeypatch, tmp_path):
    def fails(*_, **__):
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(Torch, "record", fails)
    save(tiny_decoder(tiny_config()), tmp_path, torch.float32)
    made = build_engine(tmp_path, replace(OPTIONS, kernel_check="off"))
    with pytest.raises(RuntimeError, match="no graphs here"):
        made.start()
    made.close()
