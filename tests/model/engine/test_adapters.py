"""Requests with LoRA adapters: several in one batch, none shares a prefix with another, and unloading waits for nobody."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attend.model.backends.torch import Torch
from attend.model.engine.adapters import Adapters
from attend.model.engine.build import build_engine
from attend.model.engine.engine import Engine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import FinishReason
from attend.model.errors import CheckpointError, SettingError
from attend.model.net.adapters import AdaptedDecoder, Adapter, targets_of
from attend.model.net.checkpoint import load_decoder, save
from attend.model.net.native.library import load_library as load_native
from tests.model.adapters import linears, write_adapter
from tests.model.checkpoints import tiny_decoder, write_checkpoint
from tests.model.engine.machines import answers, ask
from tests.model.net.native.test_native import shaped

OPTIONS = EngineOptions(device="cpu", dtype="float32", backend="torch", num_threads=1, kv_cache_memory=1 << 22, adapters=True)
FORMS = {
    "torch": OPTIONS,
    "native": replace(OPTIONS, dtype="bfloat16", backend="native"),
}
PROMPT = [5, 17, 80, 3] * 20
"""Two whole blocks and a half."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("model")
    save(tiny_decoder(shaped(4, 2, 32, family="llama")), place, torch.float32)
    return place


@pytest.fixture(scope="module")
def places(folder, tmp_path_factory) -> list[Path]:
    modules = linears(folder, ["q_proj", "o_proj", "up_proj", "down_proj"])
    return [write_adapter(tmp_path_factory.mktemp("adapter"), modules, seed) for seed in range(4)]


@pytest.fixture(params=FORMS)
def form(request) -> EngineOptions:
    if request.param == "native" and load_native() is None:
        pytest.skip("the native decoder is not built")
    return FORMS[request.param]


def engines(folder: Path, options: EngineOptions) -> tuple[Engine, Adapters]:
    engine = build_engine(folder, options)
    assert engine.adapters is not None
    return engine._engine, engine.adapters


def test_answers_with_adapters_in_one_batch_are_those_of_each_alone(folder, places, form):
    """And requests without one get what an engine without adapters answers."""
    engine, adapters = engines(folder, form)
    kept = [adapters.read(place) for place in places]
    owners = [None, *kept, None, kept[0]]

    def asks() -> list:
        return [ask(str(at), PROMPT[at:], 8, adapter=adapter) for at, adapter in enumerate(owners)]

    together = answers(engine, asks())
    for request in asks():
        assert answers(engine, [request]) == {request.request_id: together[request.request_id]}
    assert len({tuple(tokens) for tokens, _ in together.values()}) > 4
    plain = build_engine(folder, replace(form, adapters=False))._engine
    assert answers(plain, [ask("0", PROMPT, 8)]) == {"0": together["0"]}


def cached(engine: Engine, **fields) -> int:
    """Tokens of the prompt that were found in the prefix cache."""
    request = ask("q", PROMPT, 2, **fields)
    answers(engine, [request])
    return request.num_cached


def test_no_two_adapters_share_a_prefix(folder, places, form, tmp_path):
    """Nor do an adapter and the model, whatever salt a caller writes; those of one content are one."""
    engine, adapters = engines(folder, form)
    one, two = (adapters.read(place) for place in places[:2])
    twin = adapters.read(write_adapter(tmp_path, linears(folder, ["q_proj", "o_proj", "up_proj", "down_proj"]), 0))
    assert [cached(engine, adapter=adapter) for adapter in (None, one, two)] == [0, 0, 0]
    assert [cached(engine, adapter=adapter) for adapter in (None, one, two, twin)] == [64, 64, 64, 64]
    assert cached(engine, adapter=one, cache_salt="s") == 0
    for salt in ("s", f"{one.digest}\0", f"\0{one.digest}", f"{one.digest}\0s", one.digest):
        assert cached(engine, cache_salt=salt) == 0
    assert cached(engine, adapter=one, cache_salt="s") == 64


def test_a_request_ends_with_the_adapter_that_it_began_with(folder, places, form):
    """Though it is unloaded meanwhile, and another comes under its name; then its memory goes."""
    engine, adapters = engines(folder, form)
    adapter_registry = {"a": adapters.read(places[0])}
    [wanted] = answers(engine, [ask("before", PROMPT, 12, adapter=adapter_registry["a"])]).values()
    engine.add(ask("r", PROMPT, 12, adapter=adapter_registry["a"]))
    found = [token for output in engine.step() for token in output.token_ids]
    adapter_registry["a"] = adapters.read(places[1])
    gc.collect()
    assert len(adapters._known) == 2
    while engine.has_work:
        found += [token for output in engine.step() for token in output.token_ids]
    assert (found, FinishReason.LENGTH) == wanted
    gc.collect()
    assert list(adapters._known) == [adapter_registry["a"].digest]


def test_ten_thousand_loads_and_unloads_keep_no_memory(folder, places, form):
    """All but a few without their files; each is used once, as a request would."""
    engine, adapters = engines(folder, form)
    read, matrices = adapters.read(places[0]), targets_of(folder).read(places[0]).matrices
    for number in range(20):
        again = adapters.read(places[number % 3])
        answers(engine, [ask(str(number), [5, 17], 2, adapter=again)])
    del again

    def churn(times: int) -> None:
        for number in range(times):
            adapters._decoder.prepare(Adapter(str(number), matrices))

    churn(100)
    before = resident()
    churn(10_000)
    gc.collect()
    assert list(adapters._known) == [read.digest]
    assert resident() - before < 8 << 20  # one copy kept of each would be several hundred


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_an_adapter_for_another_model_leaves_everything_as_it_was(folder, places, form, tmp_path):
    engine, adapters = engines(folder, form)
    other = write_checkpoint("qwen2", tmp_path / "other")
    bad = write_adapter(tmp_path / "bad", linears(other, ["q_proj"]))
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: tensor .* has shape"):
        adapters.read(bad)
    assert not adapters._known
    assert answers(engine, [ask("0", PROMPT, 4, adapter=adapters.read(places[0]))])


def test_where_adapters_are_not_computed_the_start_is_refused(folder):
    net = load_decoder(folder, torch.float32, "cpu")
    with pytest.raises(SettingError, match=r"^adapters are set, but LoRA is not supported on cuda: it needs device = cpu$"):
        Torch(net.config).adapters(net, folder, "cuda", exact=False)
    with pytest.raises(SettingError, match=r"^adapters and deterministic are both set, which needs the native backend"):
        build_engine(folder, replace(OPTIONS, deterministic=True))
    assert isinstance(Torch(net.config).adapters(net, folder, "cpu", exact=False)._decoder, AdaptedDecoder)
