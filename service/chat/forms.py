"""Tool parsers and reasoning parsers as data: how families of models write calls and reasoning, and which form a chat template
has."""

from dataclasses import dataclass
from typing import Literal

Syntax = Literal["json", "tagged", "python", "braced", "named", "channels"]
NONE = "none"
ToolParser = Literal[
    "auto",
    "none",
    "hermes",
    "qwen3_coder",
    "glm",
    "llama3_json",
    "mistral",
    "mistral_list",
    "phi4",
    "granite",
    "pythonic",
    "gemma",
    "functiongemma",
    "gemma4",
    "harmony",
]
ReasoningParser = Literal["auto", "none", "think", "think_brackets", "gemma4", "seed", "harmony"]


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """Reasoning stands between two markers."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around the names and values of a call that is neither JSON nor Python."""

    name_begin: str
    name_end: str
    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    end: str
    """The text that ends a tool call."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How calls are written when they are enforced. %n stands for a name, %a for arguments, %k and %v for one of them."""

    call: str
    between: str = ""
    opening: str = ""
    closing: str = ""
    argument: str = ""
    """Of a call whose arguments are not JSON."""
    joint: str = ""
    """What stands between two arguments."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family writes calls.

    json      {"name": ..., "arguments": {...}}, alone or in a list
    named     f, a mark, and its arguments in JSON; or as json
    tagged    a name, then keys and values between tags
    python    f(key=value), alone or in a list
    braced    call:f{key:value}, with a quote that is a token
    channels  a message of its own, with the name in its header
    """

    syntax: Syntax
    layout: Layout
    begins: tuple[str, ...] = ()
    """Markers, any of which comes before calls."""
    end: str = ""
    """What follows them, where something does."""
    bare: str = ""
    """A character that begins calls without a marker, where an answer begins with it."""
    tags: Tags | None = None
    mark: str = ""
    """Between name and arguments (named); the quote of texts (braced)."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text of it that may be a token of its own."""
        tags = () if self.tags is None else tuple(getattr(self.tags, name) for name in Tags.__slots__)
        return tuple(text for text in (*self.begins, self.end, self.mark, *tags) if text)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers."""

    calls: CallForm | None = None
    reasoning: ReasoningForm | None = None

    @property
    def has_channels(self) -> bool:
        """True if an answer is a row of messages, each with a header."""
        return self.reasoning == REASONING["harmony"] or (self.calls is not None and self.calls.syntax == "channels")

    @property
    def markers(self) -> frozenset[str]:
        """Texts that stand for structure. Where one is a special token, it must still be seen here."""
        own = () if self.reasoning is None else (self.reasoning.begin, self.reasoning.end)
        calls = () if self.calls is None else self.calls.markers
        return frozenset((*own, *calls, *(HARMONY if self.has_channels else ())))


TEXT_ALONE = AnswerFormat()
"""Of a model whose answers are not split."""
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_TOOL_CALL = ("<tool_call>",)
_CODER = Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>")
_GLM = Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "")
_OBJECT = '{"name": "%n", "arguments": %a}'
_BRACES = {"argument": "%k:%v", "joint": ","}

CALLS: dict[str, CallForm] = {
    "hermes": CallForm("json", Layout(f"<tool_call>\n{_OBJECT}\n</tool_call>", "\n"), _TOOL_CALL, "</tool_call>"),
    "qwen3_coder": CallForm(
        "tagged",
        Layout("<tool_call>\n<function=%n>\n%a</function>\n</tool_call>", "\n", argument="<parameter=%k>\n%v\n</parameter>\n"),
        ("<tool_call>", "<function="),
        "</tool_call>",
        tags=_CODER,
    ),
    "glm": CallForm(
        "tagged",
        Layout("<tool_call>%n\n%a</tool_call>", "\n", argument="<arg_key>%k</arg_key>\n<arg_value>%v</arg_value>\n"),
        _TOOL_CALL,
        "</tool_call>",
        tags=_GLM,
    ),
    "llama3_json": CallForm("json", Layout('{"name": "%n", "parameters": %a}', "; "), ("<|python_tag|>",), bare="{"),
    "mistral": CallForm("named", Layout("[TOOL_CALLS]%n[ARGS]%a"), ("[TOOL_CALLS]",), mark="[ARGS]"),
    "mistral_list": CallForm("json", Layout(_OBJECT, ", ", "[TOOL_CALLS] [", "]"), ("[TOOL_CALLS]",)),
    "phi4": CallForm(
        "json", Layout(_OBJECT, ", ", "<|tool_call|>[", "]<|/tool_call|>"), ("<|tool_call|>", "functools"), "<|/tool_call|>"
    ),
    "granite": CallForm("json", Layout(_OBJECT, ", ", "<|tool_call|>[", "]"), ("<|tool_call|>", "<tool_call>")),
    "pythonic": CallForm(
        "python",
        Layout("%n(%a)", ", ", "[", "]", "%k=%v", ", "),
        ("<|python_start|>",),
        "<|python_end|>",
        bare="[",
    ),
    "gemma": CallForm("python", Layout("%n(%a)", "\n", "```tool_code\n", "\n```", "%k=%v", ", "), ("```tool_code",), "```"),
    "functiongemma": CallForm(
        "braced",
        Layout("<start_function_call>call:%n{%a}<end_function_call>", **_BRACES),
        ("<start_function_call>",),
        "<end_function_call>",
        mark="<escape>",
    ),
    "gemma4": CallForm(
        "braced", Layout("<|tool_call>call:%n{%a}<tool_call|>", **_BRACES), ("<|tool_call>",), "<tool_call|>", mark='<|"|>'
    ),
    "harmony": CallForm("channels", Layout(" to=functions.%n<|channel|>commentary <|constrain|>json<|message|>%a")),
}
"""By the name that `--tool-parser` takes."""

REASONING: dict[str, ReasoningForm] = {
    "think": ReasoningForm("<think>", "</think>"),
    "think_brackets": ReasoningForm("[THINK]", "[/THINK]"),
    "gemma4": ReasoningForm("<|channel>thought", "<channel|>"),
    "seed": ReasoningForm("<seed:think>", "</seed:think>"),
    "harmony": ReasoningForm("<|channel|>analysis<|message|>", "<|end|>"),
}
"""By the name that `--reasoning-parser` takes. Harmony's is a channel."""

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm", ("<arg_key>",)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_list", ("[TOOL_CALLS]",)),
    ("phi4", ("<|/tool_call|>",)),
    ("phi4", ("<|tool|>",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("gemma", ("```tool_code",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ('"parameters"',)),
    ("llama3_json", ("<|python_tag|>",)),
)
"""Texts of a template that show what its model writes; the first row whose texts are all there is taken."""


def form_of(template: str, tool_parser: ToolParser = "auto", reasoning_parser: ReasoningParser = "auto") -> AnswerFormat:
    """How a model with this chat template writes. A name settles a part of it; "none" says that it writes none."""
    calls = _calls_in(template) if tool_parser == "auto" else tool_parser
    reasoning = _reasoning_in(template, calls) if reasoning_parser == "auto" else reasoning_parser
    return AnswerFormat(CALLS.get(calls), REASONING.get(reasoning))


def is_reasoning_open(form: AnswerFormat, prompt: str) -> bool | None:
    """True if the answer goes on with reasoning that its prompt opens; None where the prompt ends with no reasoning.

    False: the prompt closes it, as templates write where the caller wants none.
    """
    if form.reasoning is None or form.has_channels:
        return None
    end = prompt[-64:].rstrip()
    return True if end.endswith(form.reasoning.begin) else False if end.endswith(form.reasoning.end) else None


def _calls_in(template: str) -> str:
    if "tools" not in template:
        return NONE
    return next((name for name, signs in _SIGNS if all(sign in template for sign in signs)), NONE)


def _reasoning_in(template: str, calls: str) -> str:
    if calls == "harmony" or all(sign in template for sign in dict(_SIGNS)["harmony"]):
        return "harmony"
    return next((name for name, form in REASONING.items() if form.end in template or form.begin in template), NONE)
