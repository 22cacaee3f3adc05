"""`attend generate`: the service's own path from a request to text, in one process, without Ray."""

import asyncio
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.engine.build import EngineOptions, build_engine
from model.errors import SettingError
from model.generation_config import read_defaults
from service import hub, loading
from service.adapters import Shelf
from service.checkpoint import read_tokenizer
from service.generation import GenerationService
from service.http_api.body import parse
from service.http_api.openai import CompletionWriter, to_command
from service.http_api.pieces import pieces
from service.http_api.schemas import read_completion
from service.metrics import Metrics
from service.records import Chunk, Usage, whole
from service.settings import Settings

MEMORY = 1 << 30
"""Bytes of KV cache: enough for one call."""


def generate(settings: Settings, fields: Mapping[str, Any], *, as_json: bool) -> None:
    """Run one completion; `fields` are those of /v1/completions, and `model` is the name of a LoRA adapter or None.

    Text goes to standard output as it comes.
    """
    adapters = {name: adapter_folder(settings, name) for name in (fields["model"],) if name is not None}
    settings = hub.with_folder(settings)
    options = EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        quantize=settings.quantize,
        kv_cache_memory=MEMORY,
        adapters=bool(adapters),
    )
    with loading.shown(sys.stderr, logging.getLogger("attend.engine").info) as report:
        engine = build_engine(settings.folder, options, report)
    defaults = read_defaults(settings.folder, settings.generation_config)
    tokenizer = read_tokenizer(settings.folder, engine.info.vocab_size)
    shelf = None if engine.adapters is None else Shelf(engine.adapters, adapters, most=1, taken=settings.name)
    service = GenerationService(engine, tokenizer, model_name=settings.name, defaults=defaults, shelf=shelf)
    engine.start()
    try:
        asyncio.run(_run(service, fields, as_json=as_json))
    finally:
        engine.close()


async def _run(service: GenerationService, fields: Mapping[str, Any], *, as_json: bool) -> None:
    body = read_completion(parse(json.dumps(dict(fields)).encode()))
    command = to_command(body, "offline", service.defaults)
    record = Metrics(service.engine, service.model_name).open("http", "/v1/completions")
    chunks = []
    adapter = service.adapter_of(command)
    async for batch in service.generate(command, record, adapter=adapter):
        chunks += batch
        if not as_json:
            print("".join(shown(chunk) for chunk in batch if chunk.index == 0), end="", flush=True)
    writer = CompletionWriter(
        body,
        command.request_id,
        body.model or service.model_name,
        service.fingerprint(adapter),
        Usage(command.n),
        service.tokenizer,
    )
    writer.usage.add(chunks)
    document = json.loads(b"".join(pieces(writer.whole(whole(chunks)))))
    if as_json:
        json.dump(document, sys.stdout)
    else:
        for choice in document["choices"][1:]:
            print(f"\n--- answer {choice['index']}\n{choice['text']}", end="")
    print(flush=True)


def adapter_folder(settings: Settings, name: str) -> Path:
    """The folder of an adapter: that which `adapter` names, else the one of its name in `adapters_folder`."""
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
