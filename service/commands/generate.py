"""`attend generate` and `attend run`: one answer in the terminal, to a prompt as it stands or through the chat template."""

import asyncio
import json
import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from rich.console import Console
from rich.text import Text

from attend.model.errors import SettingError
from attend.service.chat.parts import Reasoning
from attend.service.commands.offline import (
    Write,
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
    settings: Settings,
    fields: Mapping[str, Any],
    *,
    as_json: bool,
    show: bool = False,
    chat: bool | None = None,
    system: str = "",
) -> None:
    """Make one answer; `fields` are those of /v1/completions, and `model` is the name of a LoRA adapter or None.

    With `chat` the prompt is the user's message; None: where the model was taught to chat, which is said.
    Text goes to standard output as it is made; with `show` in colours for the probability of its tokens.
    """
    if show and as_json:
        raise SettingError("--show and --json cannot be given together: JSON has no colours")
    if show and fields["logprobs"] is None:
        fields = {**fields, "logprobs": 0}
    with offline_service(settings, adapter_folders(settings, fields["model"])) as (engine, service):
        template = None if chat is False else template_of(settings, service)
        if chat is None and (template is None or not was_taught(template)):
            template = None
        elif chat:
            template = require_template(template, service)
        if template is None:
            check_system(system, service)
        engine.start()
        write: Write = color_printer() if show else plain
        if template is None:
            asyncio.run(_run(run_completion(service, fields, _no_write if as_json else write), as_json=as_json))
            return
        if chat is None:
            print_line(f"attend: used the chat template of {service.model_name}: --raw continues the text itself")
        asked = to_chat(settings, service, template, as_chat(fields, system))
        asyncio.run(_run(run_chat(service, asked, _no_write if as_json else write), as_json=as_json))


def as_chat(fields: Mapping[str, Any], system: str) -> dict[str, Any]:
    """The fields of a chat for those of a completion, with the prompt as the user's message."""
    prompt, logprobs, echo = fields["prompt"], fields["logprobs"], fields["echo"]
    if not isinstance(prompt, str) or echo:
        raise SettingError("a chat takes its prompt as text, and does not echo it: leave --prompt-token-ids and --echo out")
    rest = {name: value for name, value in fields.items() if name not in ("prompt", "logprobs", "echo")}
    scores = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
    messages = [{"role": "system", "content": system}] if system else []
    return rest | scores | {"messages": [*messages, {"role": "user", "content": prompt}]}


async def _run(answer: Any, *, as_json: bool) -> None:
    document = await answer
    if as_json:
        json.dump(document, sys.stdout)
    else:
        for choice in document["choices"][1:]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            print(f"\n--- answer {choice['index']}\n{text}", end="")
    print(flush=True)


def _no_write(chunk: Chunk) -> None:
    pass


def plain(chunk: Chunk) -> None:
    """Print the text that a chunk adds; reasoning goes to a person alone, dim on standard error."""
    for part in chunk.parts or ():
        if isinstance(part, Reasoning):
            dim(part.text, end="")
    print(text_of(chunk), end="", flush=True)


@cache
def _aside() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def dim(text: str, end: str = "\n") -> None:
    """Write what is no answer, for a person alone: dim, on standard error where that is a terminal."""
    if sys.stderr.isatty():
        _aside().print(Text(text, "dim"), end=end)


SHADES = ((0.5, ""), (0.2, "yellow"), (0.05, "dark_orange"), (0.0, "bold red"))
"""Colours of tokens from these probabilities on."""


def color_printer() -> Callable[[Chunk], None]:
    """Prints the text that a chunk adds, in the colour of its least likely token; where there are no colours, says so."""
    console = Console(highlight=False, soft_wrap=True)
    if console.no_color or not console.is_terminal or console.color_system is None:
        print_line("attend: this terminal shows no colours: --json --logprobs 0 prints the probabilities as numbers")
        return plain

    def write(chunk: Chunk) -> None:
        if chunk.prompt is not None:
            console.print(Text(chunk.prompt.text), end="")
        least = math.exp(min((scored.logprob for scored in chunk.logprobs), default=0.0))
        console.print(Text(chunk.text, next(style for from_, style in SHADES if least >= from_)), end="")
        if chunk.finish_reason is not None:
            legend = [Text(f"  from {from_:.0%}", style) for from_, style in SHADES]
            console.print(Text.assemble("\n\nprobability of each token:", *legend), end="")

    return write


def text_of(chunk: Chunk) -> str:
    """The text that a chunk adds, its prompt's included where that is echoed."""
    return chunk.text if chunk.prompt is None else chunk.prompt.text + chunk.text


def parse_token_ids(name: str, text: str) -> list[int]:
    """The integers of a text such as `1,2,3`. Raises SettingError."""
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise SettingError(f"--{name} must be integers with commas between them; got {text[:64]!r}") from error
