"""Short chat templates of our own, of the constructs that published ones are made of, and conversations for them."""

from pathlib import Path
from typing import Any

Message = dict[str, Any]

TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((Path(__file__).parent / "templates").iterdir())}

ASK = [{"role": "user", "content": ' What\'s 2 < 3 & "4"?\n'}]
TALK = [
    {"role": "system", "content": "be brief /no_think"},
    {"role": "user", "content": "héllo 😀 {{7*7}} {% x %} <|im>"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi.\n"},
    {"role": "user", "content": "a\r\n\tb\n\n"},
]
PARTS = [
    {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
    {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two\n"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
    {"role": "user", "content": [{"type": "text", "text": "four"}]},
]
_CALL = {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}
_ANSWER = {"role": "tool", "name": "weather", "tool_call_id": "abcdef123", "content": '{"sky": "<clear>"}'}
USED = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    _ANSWER,
    {"role": "assistant", "content": "Clear."},
    {"role": "user", "content": "Sure?"},
]
ASKED_AGAIN = [*USED[:1], {"role": "assistant", "content": None, "reasoning": "ask", "tool_calls": [_CALL]}, _ANSWER]
LEFT = [*ASK, {"role": "assistant", "content": "an answer, ", "thinking": "unsure"}]
SWAPPED = [{"role": "assistant", "content": "me first"}, *ASK, *ASK]
CONVERSATIONS: dict[str, list[Message]] = {
    **{"ask": ASK, "talk": TALK, "parts": PARTS, "used": USED, "asked again": ASKED_AGAIN, "left": LEFT, "swapped": SWAPPED},
}

_FIELDS = {
    "city": {"type": "string", "enum": ["Zürich", "Bern"]},
    "days": {"type": ["integer", "null"]},
    "at": {"type": "array"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The sky's & the <temperature>",
            "parameters": {"type": "object", "properties": _FIELDS, "required": ["city"]},
        },
    }
]
PAPERS = [{"title": "A", "text": "first ü"}, {"title": "B", "text": "second"}]
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unprompted": {"add_generation_prompt": False},
    "tools": {"tools": TOOLS},
    "no tools": {"tools": []},
    "documents": {"documents": PAPERS, "tools": TOOLS},
}
