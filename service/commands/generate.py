"""`attend generate`: a prompt that is continued as it stands."""

import asyncio
import json
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from rich.console import Console
from rich.text import Text

from attend.service.chat.parts import Reasoning
from attend.service.commands.offline import offline_service, run_completion, template_of
from attend.service.records import Chunk
from attend.service.runtime.checkpoint import was_taught
from attend.service.runtime.terminal_lines import print_line
from attend.service.settings import Settings


def generate(settings: Settings, fields: Mapping[str, Any], *, as_json: bool) -> None:
    """Continue a prompt; `fields` are those of /v1/completions. Text goes to standard output as it is made."""
    with offline_service(settings, fields["model"]) as (engine, service):
        engine.start()
        template = None if as_json else template_of(settings, service)
        if template is not None and was_taught(template):
            print_line(f"attend: {service.model_name} was taught to chat: attend run answers a message")
        document = asyncio.run(run_completion(service, fields, _no_write if as_json else plain))
    if as_json:
        json.dump(document, sys.stdout)
    else:
        for choice in document["choices"][1:]:
            print(f"\n--- answer {choice['index']}\n{choice['text']}", end="")
    print(flush=True)


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
