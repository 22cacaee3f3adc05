"""Streams that are cut and go on, over real engines of tiny random models: what is asked, cut, and put together."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attend.model.engine.build import build_engine
from attend.model.engine.options import EngineOptions
from attend.service.generation.adapters import AdapterRegistry
from attend.v1 import generation_pb2 as pb
from tests.fakes import END, MODEL, VOCAB, Server, build_server
from tests.model.adapters import linears, write_adapter
from tests.model.checkpoints import shaped, spread
from tests.service.messages import generate_message
from tests.service.sse import events

OPTIONS = EngineOptions(
    device="cpu", dtype="float32", num_threads=1, kv_cache_memory=1 << 22, max_batch_requests=8, max_model_len=192
)
_SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": END, "eos_token_id": END, "max_position_embeddings": 256}
_SHAPE |= {"head_dim": 32, "num_hidden_layers": 2}


def written(folder: Path, family: str, **more: Any) -> Path:
    """A checkpoint of a tiny random model whose tokens are bytes."""
    if (folder / family).exists():
        return folder / family
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        net = shaped(family, **_SHAPE | more)
        spread(net)
    net.save_pretrained(folder / family)
    return folder / family


@contextmanager
def replica(folder: Path, *, adapters: Sequence[str] = (), **options: Any) -> Iterator[Server]:
    """A replica around an engine that runs, and the adapters of these names."""
    engine = build_engine(folder, replace(OPTIONS, adapters=bool(adapters), **options))
    adapter_registry = None
    if adapters:
        modules = linears(folder, ["q_proj", "v_proj", "o_proj", "down_proj"])
        places = {name: write_adapter(folder.parent / name, modules, at) for at, name in enumerate(adapters)}
        adapter_registry = AdapterRegistry(engine.adapters, places, most=8, reserved_name=MODEL)
    engine.start()
    try:
        yield build_server(engine, adapter_registry=adapter_registry)
    finally:
        engine.close()


NEIGHBOURS = [
    {"prompt": "the neighbour's own words, which are longer", "max_tokens": 30, "temperature": 0.9},
    {"prompt": "z", "max_tokens": 20, "temperature": 0},
    {"prompt": "another one", "max_tokens": 15, "temperature": 1.3, "presence_penalty": 0.5},
    {"prompt": "x" * 90, "max_tokens": 10, "temperature": 0.2},
]


async def _asked(server: Server, body: dict[str, Any], neighbours: int) -> bytes:
    """A streamed answer's bytes, beside so many other calls that run to their ends."""
    async with server.http() as client:
        others = [client.post("/v1/completions", json=each | {"ignore_eos": True}) for each in NEIGHBOURS[:neighbours]]
        own = client.post("/v1/completions", json=body | {"stream": True})
        *_, answer = await asyncio.gather(*others, own)
    assert answer.status_code == 200, answer.text
    return answer.content


def asked(server: Server, body: dict[str, Any], neighbours: int = 0) -> list[Any]:
    """The events of a streamed completion."""
    return events(asyncio.run(_asked(server, body, neighbours)))


def messages(server: Server, body: dict[str, Any]) -> list[pb.GenerateResponse]:
    """The same call over gRPC."""
    return server.rpc("GenerateStream", generate_message(body))


def told(found: Sequence[pb.GenerateResponse]) -> list[Any]:
    """What messages say together."""
    outputs = [output for message in found for output in message.outputs]
    tokens = [token for output in outputs for token in output.token_ids]
    scores = [score for output in outputs for score in output.logprobs]
    ends = [output.finish_info.SerializeToString() for output in outputs if output.HasField("finish_info")]
    counts = [output.num_tokens for output in outputs]
    assert counts == sorted(counts)
    return ["".join(output.text for output in outputs), tokens, scores, ends, counts[-1], found[-1].seed]
