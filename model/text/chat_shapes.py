"""Conversations in the shape that a chat template takes.

Templates refuse what others take, or leave it out without a word: a second system message, equal roles one after the other,
parts of a text, arguments that are an object. What a template does is found out with short conversations, each tried once.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

Message = dict[str, Any]
Shape = Callable[[Message], list[Message]]
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a message's reasoning. Templates read the first, and those of gpt-oss the second."""
_FIRST, _SECOND = _MARKS = ("first-part", "second-part")
_ASK: Message = {"role": "user", "content": "x"}
_KEY, _VALUES = "some-key", ("value-0", "value-1")
_CALLS: list[Message] = [
    {"id": f"abcdef12{at}", "type": "function", "function": {"name": f"call-{at}", "arguments": {_KEY: value}}}
    for at, value in enumerate(_VALUES)
]
_CALLED: Message = {"role": "assistant", "content": "", "tool_calls": _CALLS[:1]}
_RESULT: Message = {"role": "tool", "tool_call_id": _CALLS[0]["id"], "name": "call-0", "content": _SECOND}
_TOOL = {
    "type": "function",
    "function": {
        "name": _FIRST,
        "description": "x",
        "parameters": {"type": "object", "properties": {_SECOND: {"type": "string", "description": "x"}}, "required": []},
    },
}
_BARE: dict[str, Message] = {"empty": {"content": ""}, "null": {"content": None}, "absent": {}}
"""The contents that templates ask for in a message with calls and no text: null is DeepSeek's."""
_PAIRS = (("user", "user"), ("assistant", "assistant"), ("tool", "user"))
"""Roles of which a message of the second cannot follow one of the first everywhere."""


class ChatShapes:
    """What one chat template takes."""

    def __init__(self, render: Callable[[list[Message], list[Any] | None], str], *, reads_parts: bool) -> None:
        """`render` makes the prompt for messages and tools, as the template has it. What it raises is a refusal.

        `reads_parts`: the template may read a content as parts.
        """
        self._reads_parts = reads_parts
        self._render = render
        self._known: dict[Any, bool] = {}

    def fit(self, messages: list[Message], *, tools: bool) -> list[Message]:
        """The messages as the template takes them. `tools`: it gets tools too, for which it may have another form."""
        messages = self._fit_neighbours(self._fit_systems(messages, tools), tools)
        return [self._fit_parts(made) for message in messages for made in self._fit_calls(message, tools)]

    def try_all(self) -> None:
        """Find out what most calls need to know, so that none of them waits for it."""
        system, say = {"role": "system", "content": "x"}, {"role": "assistant", "content": "x"}
        for tools in (False, True):
            self.fit([system, system, _ASK, _ASK, say, say, _CALLED, _RESULT, _ASK, system, _ASK], tools=tools)
            self.takes_tools(system=tools)

    def takes_tools(self, *, system: bool) -> bool:
        """True if the template writes tools: their names, and those of their arguments. `system`: beside a system message."""
        talk = [{"role": "system", "content": "x"}] * system + [_ASK]
        return self._shows(("tools", system), talk, _MARKS, tools=True)

    def takes_calls(self, message: Message, *, tools: bool) -> bool:
        """True if the template writes the calls of such a message, in one of the shapes that `fit` may give them."""
        return self._call_shape(message, tools) is not None

    def takes_results(self, *, calls: bool, tools: bool) -> bool:
        """True if the template writes what tools answer. `calls`: after a message with a call, in place of a text."""
        before = self._fit_calls(_CALLED, tools) if calls else [{"role": "assistant", "content": "x"}]
        return self._shows(("results", calls, tools), [_ASK, *before, _RESULT], [_SECOND], tools=tools)

    def _fit_systems(self, messages: list[Message], tools: bool) -> list[Message]:
        """Those in front are joined where the template takes one; those that it does not take are put into user turns."""
        count = next((at for at, message in enumerate(messages) if message.get("role") != "system"), len(messages))
        front, rest = messages[:count], messages[count:]
        one, other = ({"role": "system", "content": mark} for mark in _MARKS)
        talk = [one, _ASK, {"role": "assistant", "content": "x"}, other, _ASK]
        if front and not any(self._takes_content("system", content, [_FIRST]) for content in (_FIRST, _parts(_FIRST))):
            return _systems_as_users(messages)
        if count > 1 and not self._shows(("systems", tools), [one, other, _ASK], _MARKS, tools=tools):
            front = [join_all(front)]
        if _has_system(rest) and not self._shows(("late", tools), talk, _MARKS, tools=tools):
            rest = _systems_as_users(rest)
        return front + rest

    def _fit_neighbours(self, messages: list[Message], tools: bool) -> list[Message]:
        """Messages are joined that the template does not take one after the other."""
        made: list[list[Message]] = []
        for message in messages:
            pair = (made[-1][0].get("role"), message.get("role")) if made else None
            if made and pair in _PAIRS and not self._takes_pair(pair, tools):
                made[-1].append(message)
            else:
                made.append([message])
        return list(map(join_all, made))

    def _takes_pair(self, pair: Any, tools: bool) -> bool:
        first, second = pair
        if first == "tool" and not self.takes_results(calls=True, tools=tools):
            return True  # a text would be lost with the result
        before = [_ASK] if first == "assistant" else [_ASK, *self._fit_calls(_CALLED, tools)] if first == "tool" else []
        one, other = (
            (_RESULT if first == "tool" else {"role": first}) | {"content": _FIRST},
            {"role": second, "content": _SECOND},
        )
        after = [_ASK] if second == "assistant" else []
        return self._shows((pair, tools), [*before, one, other, *after], _MARKS, tools=tools)

    def _fit_calls(self, message: Message, tools: bool) -> list[Message]:
        """A message whose calls the template writes; two where it writes either calls or a text."""
        shape = self._call_shape(message, tools) if message.get("tool_calls") else None
        return [message] if shape is None else shape(message)

    def _call_shape(self, message: Message, tools: bool) -> Shape | None:
        """What makes messages of one with calls, so that all of it is in the prompt; None where nothing does."""
        kind = "said" if message.get("content") else "empty" if "content" in message else "absent"
        calls = _CALLS[: len(message["tool_calls"])]
        probe = {"role": "assistant", "content": _FIRST, "tool_calls": calls}
        text = [_FIRST]
        if kind != "said":
            probe, text = _bare(probe, _BARE[kind]), []
        names = [*text, *(call["function"]["name"] for call in calls)]
        arguments = [_KEY, *_VALUES[: len(calls)]]
        by_id = [*text, *(call["id"] for call in calls), *arguments]  # as Kimi's, whose ids hold the names
        for wanted, after in product(([*names, *arguments], by_id, names), ([_RESULT], [])):
            for place, shape in enumerate(_SHAPES[kind]):
                key = ("calls", kind, *wanted, len(after), place, tools)
                if self._shows(key, [_ASK, *shape(probe), *after], wanted, [f"'{_KEY}':"], tools=tools):
                    return shape
        return None

    def _fit_parts(self, message: Message) -> Message:
        """Parts of a text are one text, unless the template writes parts: others fail, leave them out, or write the list.

        A text is one part where the template writes parts alone.
        """
        content, role = message.get("content"), str(message.get("role"))
        if isinstance(content, list):
            return message if self._takes_content(role, _parts(*_MARKS), _MARKS) else message | {"content": text_of(content)}
        if content and self._reads_parts and not self._takes_content(role, _FIRST, [_FIRST]):
            part = _parts(content)
            return message | {"content": part} if self._takes_content(role, _parts(_FIRST), [_FIRST]) else message
        return message

    def _takes_content(self, role: str, content: Any, wanted: Sequence[str]) -> bool:
        before, after = _TALKS.get(role, ([], []))
        probe = {"role": role, "content": content, "tool_call_id": _CALLS[0]["id"], "name": "f"}
        key = ("content", role, type(content), len(wanted))
        listed = ["'text'", '"text"'] if isinstance(content, list) else []
        return self._shows(key, [*before, probe, *after], wanted, listed)

    def _shows(
        self, key: Any, messages: list[Message], wanted: Iterable[str], unwanted: Iterable[str] = (), *, tools: bool = False
    ) -> bool:
        """True if the prompt for these messages has all that is wanted in it, and nothing unwanted."""
        if key not in self._known:
            try:
                said = self._render(messages, [_TOOL] if tools else None)
            except Exception:  # as of any other messages that it cannot render
                said = ""
            said = said.casefold()  # some write the system's text in titles
            self._known[key] = all(one in said for one in wanted) and not any(one in said for one in unwanted)
        return self._known[key]


_TALKS: dict[str, tuple[list[Message], list[Message]]] = {
    "system": ([], [_ASK]),
    "assistant": ([_ASK], [_ASK]),
    "tool": ([_ASK, _CALLED], []),
}
"""What stands before and after a message of a role in a conversation that templates accept."""


def _parts(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def text_of(content: Any) -> str:
    """A content as one text: its parts are lines."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def join_all(messages: Sequence[Message]) -> Message:
    """One message of several: their texts with empty lines between, and all their calls. The rest is that of the first."""
    if len(messages) == 1:
        return messages[0]
    made = dict(messages[0])
    for name in ("content", *REASONING):
        if any(name in message for message in messages):
            made[name] = "\n\n".join(filter(None, (text_of(message.get(name)) for message in messages)))
    if calls := [call for message in messages for call in message.get("tool_calls") or ()]:
        made["tool_calls"] = calls
    return made


def _systems_as_users(messages: list[Message]) -> list[Message]:
    """What the system says as part of the user's turn that follows, or of the one before; else as a turn of the user's."""
    made: list[Message] = []
    waiting: list[Message] = []
    for message in [*messages, None]:
        if message is not None and message.get("role") == "system":
            waiting.append({"role": "user", "content": message.get("content")})
        elif message is not None and message.get("role") == "user":
            made.append(message | join_all([*waiting, message]) if waiting else message)
            waiting = []
        else:
            if waiting and made and made[-1].get("role") == "user":
                made[-1] = join_all([made[-1], *waiting])
            elif waiting:
                made.append(join_all(waiting))
            waiting = []
            made += [] if message is None else [message]
    return made


def _has_system(messages: Iterable[Message]) -> bool:
    return any(message.get("role") == "system" for message in messages)


def _as_text(message: Message) -> Message:
    """The message with the arguments of its calls as JSON."""
    functions = [call["function"] for call in message["tool_calls"]]
    written = [
        each if isinstance(each["arguments"], str) else each | {"arguments": json.dumps(each["arguments"], ensure_ascii=False)}
        for each in functions
    ]
    return message | {
        "tool_calls": [call | {"function": each} for call, each in zip(message["tool_calls"], written, strict=True)]
    }


def _without(message: Message, *names: str) -> Message:
    return {name: value for name, value in message.items() if name not in names}


def _bare(message: Message, content: Message) -> Message:
    """The message with this content, in the same place where it has one."""
    return message | content if content else _without(message, "content")


def _shapes(kind: str) -> list[Shape]:
    """How a message with calls may be written, the usual way first: of one with a text, with an empty one, or with none."""
    ways: tuple[Callable[[Message], Message], ...] = (lambda message: message, _as_text)
    contents = [_BARE[name] for name in sorted(_BARE, key=lambda name: name != kind)]

    def whole(way: Callable[[Message], Message], message: Message) -> list[Message]:
        return [way(message)]

    def bare(content: Message, way: Callable[[Message], Message], message: Message) -> list[Message]:
        return [way(_bare(message, content))]

    def in_two(content: Message, way: Callable[[Message], Message], message: Message) -> list[Message]:
        return [_without(message, "tool_calls"), way(_bare(_without(message, *REASONING), content))]

    if kind != "said":
        return [partial(bare, content, way) for content in contents for way in ways]
    return [*(partial(whole, way) for way in ways), *(partial(in_two, content, way) for content in contents for way in ways)]


_SHAPES = {kind: _shapes(kind) for kind in ("said", "empty", "absent")}
