"""`attend generate`: one answer in the terminal, to a prompt as it stands or through the chat template."""

import asyncio
import json
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from rich.console import Console
from rich.text import Text

from attend.service.chat.parts import Reasoning
from attend.service.commands.offline import (
    adapter_folders,
    check_system,
    offline_service,
    require_template,
    run_chat,
    run_completion,
    template_of,
    to_chat,
)
from attend.service.records import Chunk
from attend.service.runtime.checkpoint import was_taught
from attend.service.runtime.terminal_lines import print_line
from attend.service.settings import Settings


def generate(
    settings: Settings, fields: Mapping[str, Any], *, as_json: bool, chat: bool | None = None, system: str = ""
) -> None:
    """Make one answer; `fields` are those of /v1/completions, and `model` is the name of a LoRA adapter or None.

    With `chat` the prompt is the user's message; None: where the model was taught to chat, which is said.
    Text goes to standard output as it is made.
    """
    with offline_service(settings, adapter_folders(settings, fields["model"])) as (engine, service):
        template = None if chat is False else template_of(settings, service)
        if chat:
            template = require_template(template, service)
        elif template is None or not was_taught(template):
            template = None
            check_system(system, service)
        engine.start()
        write = _no_write if as_json else plain
        if template is None:
            document = asyncio.run(run_completion(service, fields, write))
        else:
            if chat is None:
                print_line(f"attend: used the chat template of {service.model_name}: --raw continues the text itself")
            asked = to_chat(settings, service, template, as_chat(fields, system))
            document = asyncio.run(run_chat(service, asked, write))
    if as_json:
        json.dump(document, sys.stdout)
    else:
        for choice in document["choices"][1:]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            print(f"\n--- answer {choice['index']}\n{text}", end="")
    print(flush=True)


def as_chat(fields: Mapping[str, Any], system: str) -> dict[str, Any]:
    """The fields of a chat for those of a completion, with the prompt as the user's message."""
    rest = {name: value for name, value in fields.items() if name not in ("prompt", "logprobs")}
    scores = {} if fields["logprobs"] is None else {"logprobs": True, "top_logprobs": fields["logprobs"]}
    messages = [{"role": "system", "content": system}] if system else []
    return rest | scores | {"messages": [*messages, {"role": "user", "content": fields["prompt"]}]}


def _no_write(chunk: Chunk) -> None:
    pass


def plain(chunk: Chunk) -> None:
    """Print the text that a chunk adds; reasoning goes to a person alone, dim on standard error."""
    for part in chunk.parts or ():
        if isinstance(part, Reasoning):
            dim(part.text, end="")
    print(chunk.text, end="", flush=True)


@cache
def _aside() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def dim(text: str, end: str = "\n") -> None:
    """Write what is no answer, for a person alone: dim, on standard error where that is a terminal."""
    if sys.stderr.isatty():
        _aside().print(Text(text, "dim"), end=end)
