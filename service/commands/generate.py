"""`attend generate`: the service's own path from a request to text, in one process, without Ray."""

import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attend.model.engine.build import build_engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.options import EngineOptions
from attend.model.errors import SettingError
from attend.model.generation_config import read_defaults
from attend.service.contract.commands import to_command
from attend.service.contract.requests import read_completion
from attend.service.gathered import whole
from attend.service.generation.adapters import Shelf
from attend.service.generation.generation import GenerationService
from attend.service.http_api.body import parse
from attend.service.http_api.completion_writer import CompletionWriter
from attend.service.http_api.pieces import pieces
from attend.service.observe.metrics import Metrics
from attend.service.records import Chunk, TokenCounts
from attend.service.runtime import hub, loading
from attend.service.runtime.checkpoint import read_tokenizer
from attend.service.settings import Settings

MEMORY = 1 << 30
"""Bytes of KV cache: enough for one call."""


def generate(settings: Settings, fields: Mapping[str, Any], *, as_json: bool, show: bool = False) -> None:
    """Run one completion; `fields` are those of /v1/completions, and `model` is the name of a LoRA adapter or None.

    Text goes to standard output as it is made; with `show` in colours for the probability of its tokens.
    """
    if show and as_json:
        raise SettingError("--show and --json cannot be given together: JSON has no colours")
    adapters = {name: adapter_folder(settings, name) for name in (fields["model"],) if name is not None}
    if show and fields["logprobs"] is None:
        fields = {**fields, "logprobs": 0}
    with serving(settings, adapters) as (engine, service):
        engine.start()
        asyncio.run(_run(service, fields, as_json=as_json, write=coloured() if show else plain))


@contextmanager
def serving(
    settings: Settings, adapters: Mapping[str, Path] = MappingProxyType({})
) -> Iterator[tuple[AsyncEngine, GenerationService]]:
    """An engine for one call, not yet started, and the service around it; `adapters` are the folders of those that it has."""
    settings = hub.with_folder(settings)
    options = EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        quantize=settings.quantize,
        kv_cache_memory=MEMORY,
        adapters=bool(adapters),
    )
    with loading.shown(sys.stderr) as report:
        engine = build_engine(settings.folder, options, report)
    defaults = read_defaults(settings.folder, settings.generation_config)
    tokenizer = read_tokenizer(settings.folder, engine.info.vocab_size)
    shelf = None if engine.adapters is None else Shelf(engine.adapters, dict(adapters), most=1, taken=settings.name)
    try:
        yield engine, GenerationService(engine, tokenizer, model_name=settings.name, defaults=defaults, shelf=shelf)
    finally:
        engine.close()


async def _run(service: GenerationService, fields: Mapping[str, Any], *, as_json: bool, write: Callable[[Chunk], None]) -> None:
    document = await completed(service, fields, (lambda chunk: None) if as_json else write)
    if as_json:
        json.dump(document, sys.stdout)
    else:
        for choice in document["choices"][1:]:
            print(f"\n--- answer {choice['index']}\n{choice['text']}", end="")
    print(flush=True)


async def completed(
    service: GenerationService, fields: Mapping[str, Any], write: Callable[[Chunk], None] = lambda chunk: None
) -> dict[str, Any]:
    """What POST /v1/completions would answer to these fields; `write` gets the chunks of the first answer as they are made."""
    body = read_completion(parse(json.dumps(dict(fields)).encode()))
    command = to_command(body, "offline", service.defaults)
    record = Metrics(service.engine, service.model_name).open("http", "/v1/completions")
    chunks = []
    adapter = service.adapter_of(command)
    async for batch in service.generate(command, record, adapter=adapter):
        chunks += batch
        for chunk in batch:
            if chunk.index == 0:
                write(chunk)
    writer = CompletionWriter(
        body,
        command.request_id,
        body.model or service.model_name,
        service.fingerprint(adapter),
        TokenCounts(command.n),
        service.tokenizer,
    )
    writer.usage.add(chunks)
    document: dict[str, Any] = json.loads(b"".join(pieces(writer.whole(whole(chunks)))))
    return document


def plain(chunk: Chunk) -> None:
    """Print the text that a chunk adds."""
    print(shown(chunk), end="", flush=True)


SHADES = ((0.5, ""), (0.2, "yellow"), (0.05, "dark_orange"), (0.0, "bold red"))
"""Colours of tokens from these probabilities on."""


def coloured() -> Callable[[Chunk], None]:
    """Prints the text that a chunk adds, in the colour of its least likely token, where the terminal has colours."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)

    def write(chunk: Chunk) -> None:
        if chunk.prompt is not None:
            console.print(Text(chunk.prompt.text), end="")
        least = math.exp(min((scored.logprob for scored in chunk.logprobs), default=0.0))
        console.print(Text(chunk.text, next(style for from_, style in SHADES if least >= from_)), end="")
        if chunk.finish_reason is not None:
            legend = [Text(f"  from {from_:.0%}", style) for from_, style in SHADES]
            console.print(Text.assemble("\n\nprobability of each token:", *legend), end="")

    return write


def adapter_folder(settings: Settings, name: str) -> Path:
    """The folder of an adapter: the one given with `adapter`, else the one of this name in `adapters_folder`."""
    if name in settings.adapters:
        return settings.adapters[name]
    if not settings.adapters_folder:
        known = ", ".join(settings.adapters) or "none"
        raise SettingError(
            f"--adapter must be one adapter, NAME=FOLDER or a known NAME; got {name[:64]!r}, and known are: {known}"
        )
    return Path(settings.adapters_folder).absolute() / name


def shown(chunk: Chunk) -> str:
    """The text that a chunk adds, its prompt's included where that is echoed."""
    return chunk.text if chunk.prompt is None else chunk.prompt.text + chunk.text


def numbers(name: str, text: str) -> list[int]:
    """`1,2,3` as integers."""
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise SettingError(f"--{name} must be integers with commas between them; got {text[:64]!r}") from error
