"""What the messages and the tools of a chat look like, as /openapi.json says it; `service/chat` enforces it."""

from attend.service.chat.messages import BY_CLIENTS, MAX_CALLS, MAX_MESSAGES, MAX_NAME, NULL_ONLY
from attend.service.chat.tools import CHOICES, MAX_DESCRIPTION, MAX_TOOLS, NAME, RESULTS
from attend.service.contract.shapes import TEXT, Schema, closed, listed, one_of

_TEXT_ONLY = {"const": "text", "description": "Text is all that a part may be."}
_PARTS = listed(closed({"type": _TEXT_ONLY, "text": TEXT}, "type", "text"), minItems=1)
_NAME: Schema = TEXT | {"maxLength": MAX_NAME}
_KIND: Schema = {"const": "function", "description": "What kind of tool it is."}
_FUNCTION: Schema = {
    "type": "object",
    "properties": {"name": _NAME, "arguments": TEXT | {"description": "A JSON object, or as much of it as was written."}},
    "required": ["name", "arguments"],
}
_CALL: Schema = {
    "type": "object",
    "properties": {"id": _NAME, "type": _KIND, "function": _FUNCTION},
    "required": ["id", "function"],
}
_NOTHING: Schema = {"enum": [None, []], "description": "Taken as clients send it back with an answer: only where it is empty."}
_REASONING: Schema = {
    "type": ["string", "null"],
    "description": "What the model wrote for itself, under either name; the chat template keeps it or drops it.",
}
_ADDED: Schema = {"description": "What a client has added to the message; not looked at."}
_OF_ANY: dict[str, Schema] = {
    "content": one_of(
        TEXT, _PARTS, text="The text, or parts of it, joined by line ends where the chat template writes no parts."
    ),
    "name": {"type": ["string", "null"], "maxLength": MAX_NAME, "description": "Who it is, for templates that say so."},
    "tool_call_id": {"type": "null", "description": "Nothing."},
    **dict.fromkeys(("tool_calls", "reasoning_content", "reasoning", *BY_CLIENTS, *NULL_ONLY), _NOTHING),
}
_OF_ASSISTANT: dict[str, Schema] = {
    "content": one_of(TEXT, _PARTS, {"type": "null"}, text="The text."),
    "tool_calls": one_of({"type": "null"}, listed(_CALL, maxItems=MAX_CALLS), text="The calls of tools in it, as they came."),
    "reasoning_content": _REASONING,
    "reasoning": _REASONING,
    **dict.fromkeys(BY_CLIENTS, _ADDED),
}


def _message(roles: list[str], others: dict[str, Schema], *required: str) -> Schema:
    role = {"enum": roles, "description": "Who says it; `developer` is `system`."}
    return closed({"role": role} | _OF_ANY | others, "role", *required)


_ANSWERED = _NAME | {"description": "The call that the tool answers, of a message before."}
MESSAGES = listed(
    one_of(
        _message(["system", "developer", "user"], {}, "content"),
        _message(["tool"], {"tool_call_id": _ANSWERED}, "content", "tool_call_id"),
        _message(["assistant"], _OF_ASSISTANT),
    ),
    minItems=1,
    maxItems=MAX_MESSAGES,
)
_RESULT: Schema = {"type": ["object", "null"], "description": "A schema of what it gives back, for templates."}
_DECLARED: dict[str, Schema] = {
    "name": TEXT | {"pattern": f"^{NAME.pattern}$", "description": "Its name, which no other tool has."},
    "description": {"type": ["string", "null"], "maxLength": MAX_DESCRIPTION, "description": "What it does."},
    "parameters": {
        "type": ["object", "null"],
        "description": "A JSON schema (draft 2020-12) of its arguments, which are an object.",
    },
    **dict.fromkeys(RESULTS, _RESULT),
    "strict": {"type": ["boolean", "null"], "description": "Arguments always obey the schema. Default: false."},
}
TOOLS = listed(closed({"type": _KIND, "function": closed(_DECLARED, "name")}, "type", "function"), maxItems=MAX_TOOLS)
_BY_NAME = {"const": "function", "description": "A function by its name."}
TOOL_CHOICE = one_of(
    {"enum": list(CHOICES)},
    closed({"type": _BY_NAME, "function": closed({"name": TEXT}, "name")}, "type", "function"),
    {"type": "null"},
)
