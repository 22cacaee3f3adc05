"""`attend explain`: what a model does with a text, drawn in the terminal."""

import asyncio
import json
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attend.model.errors import SettingError
from attend.service.commands.offline import offline_service
from attend.service.generation.explain import ExplainService
from attend.service.http_api.attention import AttentionWriter
from attend.service.http_api.json_pieces import json_pieces
from attend.service.observe.metrics import Metrics
from attend.service.records import ExplainCommand
from attend.service.settings import Settings

TABLE_TOKENS = 14
"""Most tokens of which the table of weights is drawn."""
LINKS = 8
TOKENS = 40
"""Tokens that are drawn at most."""


def show(settings: Settings, text: str, *, answer: str, layer: int | None, head: int | None, lens: bool, as_json: bool) -> None:
    """Explain a text. Without `layer` the last one that attends is drawn, without `head` the mean of all heads.

    With `as_json` the answer of POST /v1/attention is printed and nothing else.
    """
    with offline_service(settings) as (engine, service):
        assert engine.explainer is not None
        explaining = ExplainService(service, engine.explainer)
        if layer is None and not as_json:
            layer = engine.explainer.last_attention
        command = ExplainCommand(
            prompt=text,
            answer=answer,
            layers=None if layer is None else (layer,),
            heads=None if head is None else (head,),
            logit_lens=1 if lens else 0,
            request_id="offline",
        )
        record = Metrics(engine, service.model_name).open("http", "/v1/attention")
        told = asyncio.run(explaining.explain(command, record, ExitStack()))
        written = b"".join(json_pieces(AttentionWriter(explaining, told).full_response()))
    if as_json:
        sys.stdout.write(written.decode() + "\n")
    else:
        draw(json.loads(written), Console(highlight=False))


def draw(explanation: dict[str, Any], console: Console) -> None:
    """The table of queries and keys, its strongest links, and the likeliest token at each place."""
    names = [visible(token["token"]) for token in explanation["tokens"]]
    if len(names) > TOKENS:
        raise SettingError(f"a terminal shows at most {TOKENS} tokens; the text has {len(names)}: --json prints all")
    for layer in explanation["layers"]:
        if layer["kind"] == "state":
            console.print(
                f"Layer {layer['layer']} has a recurrent state in place of a KV cache: it has no attention weights to show.\n"
            )
            continue
        weights = mean([head["weights"] for head in layer["heads"]])
        heads = [head["head"] for head in layer["heads"]]
        which = f"head {heads[0]}" if len(heads) == 1 else f"the mean of its {len(heads)} heads"
        last = explanation["num_layers"] - 1
        console.print(Text(f"Layer {layer['layer']} of 0 to {last}, {which}. Rows are queries; columns are keys.\n"))
        if len(names) <= TABLE_TOKENS:
            console.print(percent_rows(names, weights))
        console.print(Text("\nLargest attention weights between two tokens:"))
        for weight, query, key in links(weights):
            console.print(Text(f"  {weight:4.0%}  {names[query]} ({query}) -> {names[key]} ({key})"))
    console.print()
    console.print(token_probabilities(explanation, names))
    for layer in explanation.get("logit_lens", ()):
        guess = layer["guesses"][-1][0]
        line = f"logit lens of layer {layer['layer']:>2}: the next token is {visible(guess['token'])}"
        console.print(Text(f"{line}, {percent(guess['logprob'])}"))


def mean(heads: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """The mean over heads of rows of weights."""
    return [[sum(values) / len(heads) for values in zip(*rows, strict=True)] for rows in zip(*heads, strict=True)]


def links(weights: Sequence[Sequence[float]]) -> list[tuple[float, int, int]]:
    """The largest weights between two different tokens: (weight, query, key), the strongest first."""
    pairs = [(weight, query, key) for query, row in enumerate(weights) for key, weight in enumerate(row) if key != query]
    return sorted(pairs, key=lambda pair: (-pair[0], pair[1:]))[:LINKS]


def percent_rows(names: Sequence[str], weights: Sequence[Sequence[float]]) -> Table:
    """The attention weights as a table of percentages."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(Text("query"))
    for name in names:
        table.add_column(Text(name), justify="right", overflow="ellipsis", max_width=8)
    for name, row in zip(names, weights, strict=True):
        cells = [
            Text(f"{weight * 100:.0f}", "bold" if weight >= max(row) else "" if weight >= 0.1 else "dim") for weight in row
        ]
        table.add_row(Text(name), *cells)
    return table


def token_probabilities(explanation: dict[str, Any], names: Sequence[str]) -> Table:
    """The probability of each token, the entropy of its place, and the likeliest token there."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("place", "token", "probability", "entropy", "likeliest"):
        table.add_column(title, justify="right" if title in ("place", "probability", "entropy") else "left")
    places = [*explanation["tokens"], explanation["next"]]
    for at, (name, place) in enumerate(zip([*names, "(next)"], places, strict=True)):
        if place["entropy"] is None:
            table.add_row(str(at), Text(name), "", "", "")
            continue
        own = percent(place["logprob"]) if "logprob" in place else ""
        best = ", ".join(f"{visible(one['token'])} {percent(one['logprob'])}" for one in place["top_logprobs"][:3])
        table.add_row(str(at), Text(name), own, f"{place['entropy']:.2f} nats", Text(best))
    return table


def percent(logprob: float) -> str:
    """A probability as percents, such as 12.3%."""
    return f"{math.exp(logprob):.1%}"


def visible(token: str) -> str:
    """A token on one line, with a sign for each space."""
    return json.dumps(token, ensure_ascii=False)[1:-1].replace(" ", "␣")
