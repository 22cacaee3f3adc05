"""The numbers of the serving path are of what they say, and can be made again: each measurement once, as small as it goes."""

import asyncio
import json
import math

import pytest

from loadtest.bench import mask, parsing, per_token, serving
from loadtest.bench.client import Prompts
from loadtest.bench.figures import Figure
from loadtest.bench.over_http import engine_caller, served_model, speed

TOKENS = 6


def sane(figures: list[Figure], turns: int) -> bool:
    """As many values as turns, each a positive number."""
    return all(len(each.values) == turns and all(0 < value < math.inf for value in each.values) for each in figures)


def test_both_transports_read_the_same_call_from_the_measured_bodies():
    prompt = parsing.source_text(parsing.ORDINARY)
    http = asyncio.run(parsing.read_http(parsing.http_body(prompt)))
    grpc = asyncio.run(parsing.read_grpc(parsing.grpc_body(prompt)))
    assert (http.prompts, http.sampling, http.stops) == (grpc.prompts, grpc.sampling, grpc.stops)
    assert len(http.prompts[0]) == parsing.ORDINARY


def test_reading_is_measured_in_each_turn():
    figures = parsing.run(2)
    assert len(figures) == 4 and sane(figures, 2)


@pytest.mark.parametrize("way", list(per_token.streams()))
def test_every_way_to_a_token_ends_with_as_many_tokens_as_were_asked_for(way):
    """The streams count what arrives, and fail otherwise."""
    assert asyncio.run(per_token.at_once(per_token.streams()[way], TOKENS)) > 0


def test_a_stream_that_breaks_off_is_not_counted_as_whole():
    """The idle engine has no more than CONTEXT tokens to give."""
    stream = per_token.streams()["SSE"]
    with pytest.raises(AssertionError, match=f"{per_token.CONTEXT} events for {per_token.CONTEXT + 1} tokens"):
        asyncio.run(stream(per_token.CONTEXT + 1))


def test_the_time_of_a_token_is_measured_in_each_turn():
    figures = per_token.run(2, TOKENS)
    assert len(figures) == len(per_token.streams()) and sane(figures, 2)


def test_streams_under_a_grammar_are_as_long_as_those_without():
    """`at_once` counts the tokens, and fails otherwise."""
    figures = mask.run(1, TOKENS)
    assert len(figures) == 1 + 4 * len(mask.SPECS) and sane(figures, 1)


def test_the_streams_inside_are_of_as_many_tokens_as_were_asked_for():
    """`speed` counts them, and fails otherwise."""

    async def once():
        async with served_model() as service:
            return await speed(engine_caller(service), TOKENS, Prompts())

    assert asyncio.run(once()) > 0


def test_the_command_prints_a_table_and_writes_the_same_figures(tmp_path, capsys):
    file = tmp_path / "figures.json"
    serving.main(["parse", "per-token", "--turns", "1", "--tokens", str(TOKENS), "--json", str(file)])
    documents = json.loads(file.read_text())["figures"]
    assert len(documents) == 4 + len(per_token.streams())
    table = capsys.readouterr().out.splitlines()
    assert [row.split("|")[1].strip() for row in table[2:]] == [document["what"] for document in documents]
