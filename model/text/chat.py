"""Messages to a prompt, through the chat template of a checkpoint (Jinja, as `transformers` renders it).

The template comes with the checkpoint, never with a request; the messages come from anyone: see `chat_sandbox.py`.
"""

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, meta

from attend.model.errors import CheckpointError, InvalidRequest
from attend.model.params import describe
from attend.model.text.caller_marks import ChatText
from attend.model.text.chat_sandbox import ChatEnvironment, OverLimit, TemplateRefused, raise_exception, render_template
from attend.model.text.chat_shapes import REASONING, ChatShapes
from attend.model.text.control_tokens import ControlTokens
from attend.model.text.tokenizer_files import named_tokens, read_facts, read_object

MAX_TEMPLATE = 1 << 20
"""Longest template, in characters."""
DEFAULT, FOR_TOOLS = "default", "tool_use"
"""The templates that are used, of several: the second one where there are tools."""
_RESERVED = frozenset(("messages", "tools", "documents", "bos_token", "eos_token", "raise_exception", "strftime_now"))


class ChatTemplate:
    """A checkpoint's chat templates, compiled once. Safe to call from several threads. A render takes at most about 2 s of its
    thread's own time: where the machine stands still, the caller is not to blame.
    """

    def __init__(
        self,
        source: str,
        *,
        for_tools: str | None = None,
        clock: Callable[[], float] = time.thread_time,
        now: Callable[[], datetime] = datetime.now,
        **tokens: str,
    ) -> None:
        """`for_tools` is the template for calls with tools, where it is another; `tokens` the special ones by name."""
        environment = ChatEnvironment()
        self._template, read = _compile_template(environment, source)
        self._for_tools, more = (self._template, read) if for_tools is None else _compile_template(environment, for_tools)
        variables = read | more | {"add_generation_prompt"}
        self.options = frozenset(variables - _RESERVED - set(environment.globals) - set(tokens))
        """Variables that `render` takes beside the messages."""
        self.source = source
        self.sources = source + (for_tools or "")
        """All that is written in the templates."""
        self.control: ControlTokens | None = None
        """The tokens that callers cannot write; None where control tokens in their texts are control tokens."""
        self._clock = clock
        self._always = {
            **tokens,
            "raise_exception": raise_exception,
            "strftime_now": lambda wanted: now().strftime(str(wanted)[:256]),
        }
        self.shapes = ChatShapes(self._render_probe, reads_parts="text" in self.sources)
        """What the template takes, as it turns out where it is asked."""

    @classmethod
    def load(
        cls,
        folder: Path,
        file: Path | None = None,
        *,
        clock: Callable[[], float] = time.thread_time,
        now: Callable[[], datetime] = datetime.now,
    ) -> "ChatTemplate | None":
        """The templates of a folder, or that of a file beside it; None where there is none. Raises CheckpointError.

        They stand in `chat_template.jinja` and `additional_chat_templates/`, else in `tokenizer_config.json`, else in
        `chat_template.json`.
        """
        facts = read_facts(folder)
        if file is not None:
            return cls._of(file, {DEFAULT: _text_of(file)}, named_tokens(facts), clock, now)
        sources = _in_files(folder) or _templates_by_name(facts.get("chat_template"), folder / "tokenizer_config.json")
        if not sources:
            path = folder / "chat_template.json"
            sources = _templates_by_name(read_object(path).get("chat_template"), path)
        return cls._of(folder, sources, named_tokens(facts), clock, now) if sources.get(DEFAULT) else None

    @classmethod
    def _of(
        cls,
        place: Path,
        sources: dict[str, str],
        tokens: dict[str, str],
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> "ChatTemplate":
        try:
            return cls(sources[DEFAULT], for_tools=sources.get(FOR_TOOLS), clock=clock, now=now, **tokens)
        except CheckpointError as error:
            raise CheckpointError(f"{place}: {error}") from error.__cause__

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        /,
        **variables: Any,
    ) -> str:
        """As `write`, but only the text."""
        return self.write(messages, tools, documents, **variables).text

    def write(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        /,
        **variables: Any,
    ) -> ChatText:
        """The prompt for `messages`, with the parts of it that are no control tokens.

        A content is a text, or a list of text parts. What the template would refuse, or leave out, is written in a shape that
        it takes: see `chat_shapes.py`.
        `variables` are further values for the template, add_generation_prompt (true unless given) among them.
        Raises InvalidRequest where the template refuses the messages, cannot render them, or makes too much of them.
        """
        for name in variables.keys() - self.options:
            where = "chat_template_kwargs"
            raise InvalidRequest(f"{where}: {describe(name)} is not an option of this model's chat template", where)
        given = {"add_generation_prompt": True, "tools": tools, "documents": documents} | variables
        fitted = self.shapes.fit([_read(message) for message in messages], tools=bool(tools))
        try:
            return self._prompt(fitted, given)
        except (TemplateRefused, OverLimit) as error:
            raise InvalidRequest(f"messages: the chat template {error}", "messages") from error
        except Exception as error:  # whatever a template does wrong; what it was is for the log, not for the caller
            raise InvalidRequest("messages: the model's chat template cannot render these messages", "messages") from error

    def _prompt(self, messages: list[dict[str, Any]], given: dict[str, Any]) -> ChatText:
        if self.control is None:
            return ChatText(self._text(messages, given))
        marked = self.control.mark_texts
        told = [{name: value if name == "role" else marked(value) for name, value in each.items()} for each in messages]
        return self.control.read(self._text(told, {name: marked(value) for name, value in given.items()}))

    def _text(self, messages: list[dict[str, Any]], given: dict[str, Any]) -> str:
        template = self._template if given.get("tools") is None else self._for_tools
        return render_template(template, self._always | given | {"messages": messages}, self._clock)

    def _render_probe(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        return self._text(messages, {"add_generation_prompt": True, "tools": tools, "documents": None})


def _read(message: dict[str, Any]) -> dict[str, Any]:
    """A message as `transformers` hands it over: without nulls, its reasoning under every name that is read."""
    read = {name: value for name, value in message.items() if value is not None}
    reasoning = next((read[name] for name in REASONING if name in read), None)
    return read if reasoning is None else {"thinking": reasoning} | read | {"reasoning_content": reasoning}


def _compile_template(environment: ChatEnvironment, source: str) -> tuple[Template, set[str]]:
    """A compiled template, and the names of the variables that it reads."""
    if len(source) > MAX_TEMPLATE:
        raise CheckpointError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE} are read")
    try:
        return environment.from_string(source), meta.find_undeclared_variables(environment.parse(source))
    except Exception as error:  # beside Jinja's own: RecursionError, and SyntaxError for too many nested blocks
        raise CheckpointError(f"the chat template cannot be compiled: {error}") from error


def _in_files(folder: Path) -> dict[str, str]:
    """Templates that are files of their own, by name."""
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    default = folder / "chat_template.jinja"
    paths = ({DEFAULT: default} if default.is_file() else {}) | paths
    return {name: _text_of(path) for name, path in paths.items()}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _templates_by_name(templates: Any, path: Path) -> dict[str, str]:
    """Templates of a JSON file by name: one text is the default."""
    if templates is None or isinstance(templates, str):
        return {} if not templates else {DEFAULT: templates}
    try:
        named = {item["name"]: item["template"] for item in templates}
    except (TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: chat_template is neither a text nor named texts") from error
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise CheckpointError(f"{path}: chat_template is neither a text nor named texts")
    return named
