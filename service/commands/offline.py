"""The service without a server or Ray, in this process, for the commands that generate."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attend.model.engine.build import build_engine
from attend.model.engine.loop import AsyncEngine
from attend.model.engine.options import EngineOptions
from attend.model.errors import NoChatTemplate, SettingError
from attend.model.generation_config import read_defaults
from attend.model.text.chat import ChatTemplate
from attend.service.chat.forms import form_of
from attend.service.contract.commands import to_command
from attend.service.contract.requests import ChatRequest, CompletionRequest
from attend.service.generation.adapters import AdapterRegistry
from attend.service.generation.generation import GenerationService
from attend.service.http_api.body import parse_json
from attend.service.http_api.chat_writer import ChatWriter
from attend.service.http_api.completion_writer import CompletionWriter
from attend.service.http_api.json_pieces import json_pieces
from attend.service.merging import merge_chunks
from attend.service.observe.metrics import Metrics
from attend.service.records import Chunk, Command, TokenCounts
from attend.service.runtime import hub
from attend.service.runtime.checkpoint import read_template, read_tokenizer
from attend.service.settings import Settings

MEMORY = 1 << 30
"""Bytes of KV cache: enough for one call."""
Write = Callable[[Chunk], None]


@contextmanager
def offline_service(
    settings: Settings, adapters: Mapping[str, Path] = MappingProxyType({})
) -> Iterator[tuple[AsyncEngine, GenerationService]]:
    """An engine for one call at a time, not yet started, and the service around it; `adapters` are the folders of its own."""
    settings = hub.with_folder(settings)
    options = EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        quantize=settings.quantize,
        kv_cache_memory=MEMORY,
        adapters=bool(adapters),
    )
    engine = build_engine(settings.folder, options)
    defaults = read_defaults(settings.folder, settings.generation_config)
    tokenizer = read_tokenizer(settings.folder, engine.info.vocab_size)
    adapter_registry = (
        None
        if engine.adapters is None
        else AdapterRegistry(engine.adapters, dict(adapters), most=1, reserved_name=settings.name)
    )
    try:
        yield (
            engine,
            GenerationService(
                engine, tokenizer, model_name=settings.name, defaults=defaults, adapter_registry=adapter_registry
            ),
        )
    finally:
        engine.close()


def template_of(settings: Settings, service: GenerationService) -> ChatTemplate | None:
    """The chat template that a server with these settings would have. A model of the hub is in the cache by now."""
    folder = hub.with_folder(settings).folder
    file = Path(settings.chat_template) if settings.chat_template else None
    return read_template(folder, service.tokenizer, file, special_tokens_in_content=settings.special_tokens_in_content)


def require_template(template: ChatTemplate | None, service: GenerationService) -> ChatTemplate:
    """The chat template, or NoChatTemplate."""
    if template is None:
        raise NoChatTemplate(
            f"{service.model_name} has no chat template: `attend generate` continues a text with it, and --chat-template FILE "
            "gives it one"
        )
    return template


def check_system(system: str, service: GenerationService) -> None:
    """Raise SettingError for a system prompt where a text is continued as it stands."""
    if system:
        raise SettingError(f"--system needs a chat, and {service.model_name} continues the text as it stands here")


def to_chat(
    settings: Settings, service: GenerationService, template: ChatTemplate, fields: Mapping[str, Any]
) -> tuple[ChatRequest, Command]:
    """What POST /v1/chat/completions makes of these fields."""
    body = ChatRequest.read(parse_json(json.dumps(dict(fields)).encode()))
    form = form_of(template.sources, settings.tool_parser, settings.reasoning_parser)
    return body, to_command(body, "offline", service.defaults, template, form)


async def run_chat(service: GenerationService, request: tuple[ChatRequest, Command], write: Write) -> dict[str, Any]:
    """What POST /v1/chat/completions would answer; see `completed`."""
    return await _run_answer(service, ChatWriter, *request, write)


async def run_completion(
    service: GenerationService, fields: Mapping[str, Any], write: Write = lambda chunk: None
) -> dict[str, Any]:
    """What POST /v1/completions would answer to these fields; `write` gets the chunks of the first answer as they are made."""
    body = CompletionRequest.read(parse_json(json.dumps(dict(fields)).encode()))
    return await _run_answer(service, CompletionWriter, body, to_command(body, "offline", service.defaults), write)


async def _run_answer(
    service: GenerationService, kind: Callable[..., Any], body: ChatRequest | CompletionRequest, command: Command, write: Write
) -> dict[str, Any]:
    route = "/v1/completions" if isinstance(body, CompletionRequest) else "/v1/chat/completions"
    record = Metrics(service.engine, service.model_name).open("http", route)
    chunks = []
    adapter = service.adapter_of(command)
    async with aclosing(service.generate(command, record, adapter=adapter)) as batches:
        async for batch in batches:
            chunks += batch
            for chunk in batch:
                if chunk.index == 0:
                    write(chunk)
                    await asyncio.sleep(0)  # a terminal may be slow: Ctrl-C comes between any two chunks
    name, fingerprint = body.model or service.model_name, service.fingerprint(adapter)
    writer = kind(body, command.request_id, name, fingerprint, TokenCounts(command.n), service.tokenizer)
    writer.usage.add(chunks)
    document: dict[str, Any] = json.loads(b"".join(json_pieces(writer.full_response(merge_chunks(chunks)))))
    return document


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


def adapter_folders(settings: Settings, name: str | None) -> dict[str, Path]:
    """The folder of the adapter that a call names, by its name."""
    return {} if name is None else {name: adapter_folder(settings, name)}
