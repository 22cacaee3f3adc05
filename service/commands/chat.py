"""`attend chat`: a conversation in the terminal, without a server or Ray. A turn computes what is new of it alone."""

import asyncio
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from attend.model.engine.request import FinishReason
from attend.model.errors import AttendError, ContextTooLong
from attend.model.text.chat import ChatTemplate
from attend.service.chat.parts import Reasoning
from attend.service.commands.generate import dim, plain
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
from attend.service.commands.start import interrupt_unwinds
from attend.service.generation.generation import GenerationService
from attend.service.records import Chunk
from attend.service.runtime.checkpoint import was_taught
from attend.service.runtime.terminal_lines import print_line
from attend.service.settings import Settings

QUOTES = '"""'
INTERRUPTED = 130
"""The status that Ctrl-C ends with."""
ROOM = 512
"""Tokens that the history leaves to an answer without --max-tokens, or a quarter of the context."""
HELP = f"""\
/system TEXT  the system prompt from now on; without TEXT: show it
/reset        forget the conversation; the system prompt stays
/help         this list
/bye          leave, as Ctrl-D does
{QUOTES}           begins and ends a message of several lines
Ctrl-C        stops an answer; at the empty prompt it leaves"""
CALM = {"temperature": 0.7, "top_p": 0.95}
"""How is drawn where neither flags nor the model say: at temperature 1, as over the wire, small models talk nonsense."""


@dataclass
class Conversation:
    """What was said, and the model that answers. `fields` are those of /v1/chat/completions beside the messages."""

    settings: Settings
    service: GenerationService
    template: ChatTemplate
    fields: Mapping[str, Any]
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Tokens of the context that the history leaves to the answer."""
        most = self.service.engine.info.max_model_len
        return min(self.fields.get("max_tokens") or min(ROOM, most // 4), most - 1)

    async def answer(self, text: str) -> None:
        """Print the answer to a message, and remember both; of an answer that is stopped, what was printed.

        Where the context is full the oldest rounds are forgotten, and that is said. A message without an answer is not
        remembered. Raises InvalidRequest for one that cannot be answered.
        """
        before, self.messages = self.messages, [*self.messages, {"role": "user", "content": text}]
        answer = Answer()
        try:
            asked = await self._fitting()
            await run_chat(self.service, asked, answer.take)
        finally:
            if answer.last is None:
                self.messages = before
            else:
                print(flush=True)
                self.messages.append(answer.message)
        dim(answer.speed())

    async def _fitting(self) -> Any:
        """The call, with as many of the latest rounds as leave room for an answer."""
        most, forgotten = self.service.engine.info.max_model_len, 0
        while True:
            system = [{"role": "system", "content": self.system}] if self.system else []
            asked = to_chat(self.settings, self.service, self.template, {**self.fields, "messages": [*system, *self.messages]})
            size = len(await self.service.tokens_of(asked[1].prompts[0]))
            if size <= most - self.room:
                break
            if len(self.messages) < 3:
                raise ContextTooLong(
                    f"the message is too long: with the system prompt it has {size} tokens, and the context of {most} "
                    f"leaves {self.room} to the answer"
                )
            del self.messages[:2]
            forgotten += 1
        if forgotten:
            rounds = "the oldest round was" if forgotten == 1 else f"the {forgotten} oldest rounds were"
            print_line(f"attend: the context of {most} tokens is full: {rounds} forgotten")
        return asked


class Answer:
    """One answer as it is printed."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._started, self._first = time.perf_counter(), 0.0
        self.last: Chunk | None = None

    def take(self, chunk: Chunk) -> None:
        """Print a chunk of the answer, and keep it."""
        self._first = self._first or time.perf_counter()
        self.last = chunk
        self._texts.append(chunk.text)
        self._reasoning += (part.text for part in chunk.parts or () if isinstance(part, Reasoning))
        plain(chunk)

    @property
    def message(self) -> dict[str, str]:
        """What later turns are told of it."""
        reasoning = "".join(self._reasoning)
        return {"role": "assistant", "content": "".join(self._texts)} | ({"reasoning_content": reasoning} if reasoning else {})

    def speed(self) -> str:
        """How fast it came, in a line."""
        assert self.last is not None, "an answer has a last chunk"
        seconds, count = time.perf_counter() - self._first, self.last.num_tokens
        rate = f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds else ""
        end = "; --max-tokens, or the context, has ended it" if self.last.finish_reason is FinishReason.LENGTH else ""
        return f"[{count} tokens{rate}, the first after {self._first - self._started:.2f} s{end}]"


def chat(settings: Settings, fields: Mapping[str, Any], *, system: str, message: str | None) -> int:
    """Talk until the input ends; with `message` answer it alone. Returns the exit status."""
    with offline_service(settings, adapter_folders(settings, fields.get("model"))) as (engine, service):
        template = template_of(settings, service)
        if not {"temperature", "top_p"} & {*fields, *service.defaults.sampling}:
            fields = {**CALM, **fields}
        if message is not None and template is None:
            check_system(system, service)
            print_line(f"attend: {service.model_name} has no chat template: the text is continued as it stands")
            engine.start()
            asyncio.run(run_completion(service, {**fields, "prompt": message}, plain))
            print(flush=True)
            return 0
        template = require_template(template, service)
        talk = Conversation(settings, service, template, fields, system)
        engine.start()
        if not was_taught(template):
            print_line(f"attend: {service.model_name} was not taught to chat: it continues Python")
        with asyncio.Runner() as runner:
            if message is not None:
                runner.run(talk.answer(message))
                return 0
            interrupt_unwinds()
            print_line(f"{service.model_name}: /help lists what can be typed beside messages, /bye leaves")
            return _loop(talk, runner)


def _loop(talk: Conversation, runner: asyncio.Runner) -> int:
    """Read messages and print their answers until the input ends; returns the exit status."""
    while True:
        try:
            text = read_message()
        except EOFError:
            print(flush=True)
            return 0
        except KeyboardInterrupt:
            print(flush=True)
            if _has_typed():
                continue
            return INTERRUPTED
        except UnicodeDecodeError as error:
            print_line(f"attend: the message is not UTF-8: {error.reason}")
            continue
        if not text.strip():
            continue
        if text.startswith("/") and text.partition(" ")[0][1:].isalpha():
            if not command(talk, *text.strip().partition(" ")[::2]):
                return 0
            continue
        try:
            runner.run(talk.answer(text.removeprefix(QUOTES).removesuffix(QUOTES) if text.startswith(QUOTES) else text))
        except KeyboardInterrupt:
            print_line("attend: the answer was stopped")
        except AttendError as error:
            print_line(f"attend: {error}")


def command(talk: Conversation, name: str, rest: str) -> bool:
    """Carry out a line that begins with a slash; whether the conversation goes on."""
    if name == "/system":
        talk.system = rest.strip() or talk.system
        print_line(f"system prompt: {talk.system or 'none'}")
    elif name == "/reset":
        talk.messages = []
        print_line("the conversation is forgotten")
    elif name == "/help":
        print_line(HELP)
    elif name != "/bye":
        print_line(f"attend: there is no {name}: /help lists what there is. A message that begins so stands between {QUOTES}")
    return name != "/bye"


def read_message() -> str:
    """One message of the terminal: a line, or several between quotes."""
    text = _read(">>> ")
    if text.startswith(QUOTES):
        while not text.removeprefix(QUOTES).rstrip().endswith(QUOTES):
            text += "\n" + _read("... ")
        return text.rstrip()
    return text


def _read(prompt: str) -> str:
    """A line. Python's readline, where there is one, edits it and has the earlier ones."""
    if sys.stdout.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - `input` uses it
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line.removesuffix("\n")


def _has_typed() -> bool:
    """True if something stood in the line that Ctrl-C has ended."""
    readline = sys.modules.get("readline")
    return bool(readline is not None and readline.get_line_buffer())
