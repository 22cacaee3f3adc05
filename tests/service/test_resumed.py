"""The law of streams that are cut: what comes before a cut and after it, by `resume_token_ids`, is the uncut answer.

Over every way of computing, and every kind of call.
"""

import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import Server
from tests.model.net.laws.ways import NATIVE
from tests.service.resumed import asked, messages, replica, told, written
from tests.service.sse import joined, same

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["é", "zz"]}, "b": {"type": "integer"}}, "required": ["a", "b"]}
SAMPLED = {"temperature": 1.0, "seed": 11, "ignore_eos": True}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": SAMPLED | {"top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "a seed of the server's": {"temperature": 1.0, "ignore_eos": True},
    "penalties": SAMPLED | {"presence_penalty": 0.7, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "biases": SAMPLED | {"logit_bias": {"97": 6, "98": 6, "99": -50}, "bad_words": ["ab"], "min_tokens": 9},
    "allowed": SAMPLED | {"allowed_token_ids": [97, 98, 195, 169, 240, 159, 142, 137]},
    "stop strings": SAMPLED | {"allowed_token_ids": [97, 98], "stop": ["ababb", "bbbbb"], "max_tokens": 90},
    "stop strings, kept": {
        **SAMPLED,
        "allowed_token_ids": [97, 98],
        "stop": ["abaab"],
        "include_stop_str_in_output": True,
        "min_tokens": 10,
        "max_tokens": 90,
    },
    "stop tokens": SAMPLED | {"stop_token_ids": [*range(64, 72)], "ignore_eos": False},
    "scores": SAMPLED | {"logprobs": 2, "prompt_logprobs": 1},
    "echo": SAMPLED | {"echo": True, "logprobs": 1},
    "schema": SAMPLED | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "regex": SAMPLED | {"structured_outputs": {"regex": "(é|ab|漢){6,9}x"}},
    "truncated": SAMPLED | {"truncate_prompt_tokens": 5, "cache_salt": "s"},
}
PROMPT = "what is cut, grows anew: é漢"
USAGE = {"stream_options": {"include_usage": True}, "return_token_ids": True}


def body_of(call: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 30} | USAGE | call | more


def has_bits(server: Server) -> bool:
    """True if scores have the same bits in any batch, and not tokens alone."""
    return server.engine.info.backend.startswith("native")


def cuts(documents: list[Any]) -> list[int]:
    """After how many events a stream is cut: the first, inside a character, where text is held back, before the end and the
    usage, and another.
    """
    ends = [at for at, document in enumerate(documents) if document != "[DONE]" and document["choices"]]
    inside = [at + 1 for at in ends if documents[at]["choices"][0]["text"] == ""]
    last = len(documents)
    dice = random.Random(last)
    return sorted({1, *inside[:1], last - 3, last - 2, last - 1, dice.randrange(1, last)} - {0})


def check_whole(server: Server, found: list[Any]) -> None:
    """What is joined is one answer: the text is that of the tokens, which are counted, and there is one end."""
    text, lists, ends, (usage,), done = found
    assert (len(ends), done, usage["completion_tokens"]) == (1, ["[DONE]"], len(lists["token_ids"]))
    if "text_offset" not in lists or len(lists["text_offset"]) == len(lists["token_ids"]):
        decoded = server.service.tokenizer.decode(lists["token_ids"])
        assert text == (decoded if ends[0][0] == "length" else text) and decoded.startswith(text)


def of_prompt(document: Any, call: dict[str, Any]) -> list[Any]:
    """What a first event tells of its prompt, taken out of it: a call that goes on by its tokens tells it again."""
    (choice,) = document["choices"]
    ids = choice.pop("prompt_token_ids")
    told = [ids, choice.pop("prompt_logprobs", None)]
    if call.get("echo"):
        assert choice["text"].startswith(PROMPT)
        choice["text"] = choice["text"].removeprefix(PROMPT)
        for values in choice["logprobs"].values():
            told.append(values[: len(ids)])
            del values[: len(ids)]
    return told


def check_tokens(server: Server, call: dict[str, Any], *, exact: bool = True) -> None:
    """By `resume_token_ids`: the uncut answer or, not `exact`, one that begins with these tokens."""
    documents = asked(server, body_of(call), neighbours=2)
    wanted = joined(documents)
    for place in cuts(documents):
        before = documents[:place]
        choices = [choice for document in before if document != "[DONE]" for choice in document["choices"]]
        if choices[-1]["finish_reason"]:
            continue
        received = [token for choice in choices for token in choice["token_ids"]]
        more = {"seed": documents[0]["seed"], "resume_token_ids": received}
        rest = asked(server, body_of(call, **more), neighbours=place % 5)
        again, first = of_prompt(rest[0], call), of_prompt(deepcopy(documents[0]), call)
        assert same(again, first, bits=has_bits(server)) or not exact
        found = joined([*before, *rest])
        assert not exact or same(found, wanted, bits=has_bits(server)), place
        check_whole(server, found)


def check_messages(server: Server, call: dict[str, Any]) -> None:
    """By `resume_token_ids` over gRPC."""
    fields = {name: value for name, value in call.items() if name not in ("echo", "prompt_logprobs")}  # told again
    if fields.keys() & {"response_format", "structured_outputs"}:
        return  # HTTP has the same `Command`
    body = {"prompt": "what is cut", "max_tokens": 30, "return_token_ids": True} | fields
    whole = messages(server, body)
    for place in {1, len(whole) // 2, len(whole) - 1} - {0, len(whole)}:
        before = whole[:place]
        received = [token for message in before for output in message.outputs for token in output.token_ids]
        rest = messages(server, body | {"seed": whole[0].seed, "resume_token_ids": received})
        assert same(told([*before, *rest]), told(whole), bits=has_bits(server)), place


each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resumed")


NATIVELY = {"dtype": "bfloat16", "backend": "native"}
needs_native = pytest.mark.skipif(not NATIVE, reason="no native library was built here")


@pytest.fixture(
    scope="module",
    params=[pytest.param(NATIVELY, marks=needs_native, id="native"), pytest.param({}, marks=pytest.mark.long, id="torch")],
)
def plain(room: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    with replica(written(room, "Qwen3"), **request.param) as server:
        yield server


@each_call
def test_every_kind_of_call_goes_on_after_its_tokens(plain, call):
    check_tokens(plain, call)


@each_call
def test_every_kind_of_call_goes_on_after_its_tokens_over_grpc(plain, call):
    check_messages(plain, call)


WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
DELTA |= {"num_hidden_layers": 4}
CONVS = {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 8, "num_hidden_layers": 4}
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "torch, guessing": ("Qwen3", {}, {"draft_tokens": 6}),
    "torch, few blocks": ("Qwen3", {}, {"kv_cache_memory": 7 * 2 * 32 * 2 * 2 * 32 * 4, "block_size": 32}),
    "torch, small steps": ("Qwen3", {}, {"max_batch_tokens": 9}),
    "torch, no prefixes": ("Qwen3", {}, {"prefix_caching": False}),
    "torch, delta, guessing": ("Qwen3_5Text", DELTA, {"draft_tokens": 6}),
    "torch, convolutions": ("Lfm2", CONVS, {}),
    "native": ("Qwen3", {}, NATIVELY),
    "native, int8": ("Qwen3", {}, NATIVELY | {"quantize": "int8"}),
    "native, int4": ("Qwen3", {}, NATIVELY | {"quantize": "int4"}),
    "native, int8 cache": ("Qwen3", {}, NATIVELY | {"kv_dtype": "int8"}),
    "native, guessing": ("Qwen3", {}, NATIVELY | {"draft_tokens": 6}),
    "native, delta, guessing": ("Qwen3_5Text", DELTA, NATIVELY | {"draft_tokens": 6}),
    "native, convolutions": ("Lfm2", CONVS, NATIVELY),
    "native, windows": ("Qwen2", WINDOW, NATIVELY),
}
USUAL = ("greedy", "stop strings", "scores", "schema")


def marks_of(way: str) -> Any:
    """Torch takes ten times as long as the native decoder."""
    if "native" in way:
        return needs_native
    return () if way in ("torch, delta, guessing", "bfloat16") else pytest.mark.long


@pytest.mark.parametrize(
    ("family", "shape", "options"),
    [pytest.param(*way, id=name, marks=marks_of(name)) for name, way in WAYS.items()],
)
def test_every_way_of_computing_goes_on(room, family, shape, options):
    with replica(written(room, family, **shape), **options) as server:
        for name in USUAL:
            check_tokens(server, CALLS[name])
        stats = server.engine.stats()
    assert bool(stats.num_accepted) == ("draft_tokens" in options)
    assert bool(stats.num_preemptions) == ("kv_cache_memory" in options)
    assert bool(stats.num_prefix_hits) == options.get("prefix_caching", True)


INEXACT: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", "backend": "torch"},
    "int8 cache": {"backend": "torch", "kv_dtype": "int8"},
}


@pytest.mark.parametrize("options", [pytest.param(INEXACT[name], id=name, marks=marks_of(name)) for name in INEXACT])
def test_where_bits_depend_on_the_batch_it_begins_with_the_same_tokens(room, options):
    with replica(written(room, "Qwen3"), **options) as server:
        for seed in range(2):
            check_tokens(server, SAMPLED | {"seed": seed, "logprobs": 1, "max_tokens": 50}, exact=False)


@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.long), pytest.param(NATIVELY, marks=needs_native)], ids=["torch", "native"]
)
def test_an_answer_of_an_adapter_goes_on_beside_others(room, options):
    with replica(written(room, "Qwen3"), adapters=("one", "two"), **options) as server:
        for name in ("greedy", "scores"):
            check_tokens(server, CALLS[name] | {"model": "two"})
