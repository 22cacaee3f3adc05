"""What the fields of a chat mean, as /openapi.json says it; `service/chat` enforces it."""

from service.chat.messages import BY_CLIENTS, MAX_CALLS, MAX_MESSAGES, MAX_NAME
from service.chat.prompt import EFFORTS
from service.chat.tools import CHOICES, MAX_DESCRIPTION, MAX_SCHEMA_BYTES, MAX_TOOLS, NAME, RESULTS
from service.http_api.notes import TEXT, Note, Schema, listed

PARTS = listed(
    {
        "type": "object",
        "properties": {"type": {"const": "text", "description": "Text is all that a part may be."}, "text": TEXT},
        "required": ["type", "text"],
        "additionalProperties": False,
    },
    minItems=1,
)
_CONTENT: Schema = {
    "anyOf": [TEXT, PARTS],
    "description": "The text, or parts of it, joined by line ends where the chat template writes no parts.",
}
_NOTHING: Schema = {"enum": [None, []], "description": "Taken as clients send it back with an answer: only where it is empty."}
_NULL_ONLY = ("function_call", "refusal", "audio", "annotations")
_NAME: Schema = {"type": ["string", "null"], "maxLength": MAX_NAME}


_FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "name": TEXT | {"maxLength": MAX_NAME},
        "arguments": TEXT | {"description": "A JSON object, or nothing."},
    },
    "required": ["name", "arguments"],
}
_CALLS: Schema = {
    "anyOf": [
        {"type": "null"},
        listed(
            {
                "type": "object",
                "properties": {
                    "id": TEXT | {"maxLength": MAX_NAME},
                    "type": {"const": "function", "description": "What kind of tool it is."},
                    "function": _FUNCTION,
                },
                "required": ["id", "function"],
            },
            maxItems=MAX_CALLS,
        ),
    ],
    "description": "The calls of tools in it, as they came.",
}
_REASONING: Schema = {
    "type": ["string", "null"],
    "description": "What the model wrote for itself, under either name; the chat template keeps it or drops it.",
}


def message(roles: list[str], content: Schema, required: list[str], **others: Schema) -> Schema:
    """What a message of these roles may hold."""
    empty = dict.fromkeys(("tool_calls", "reasoning_content", "reasoning", *BY_CLIENTS, *_NULL_ONLY), _NOTHING)
    properties = {
        "role": {"enum": roles, "description": "Who says it; `developer` is `system`."},
        "content": content,
        "name": _NAME | {"description": "Who it is, for templates that say so."},
        "tool_call_id": {"type": "null", "description": "Nothing."},
    }
    return {"type": "object", "properties": properties | empty | others, "required": required, "additionalProperties": False}


MESSAGES = [
    message(["system", "developer", "user"], _CONTENT, ["role", "content"]),
    message(
        ["tool"],
        _CONTENT,
        ["role", "content", "tool_call_id"],
        tool_call_id=TEXT | {"maxLength": MAX_NAME, "description": "The call that the tool answers, of a message before."},
    ),
    message(
        ["assistant"],
        {"anyOf": [TEXT, PARTS, {"type": "null"}], "description": "The text."},
        ["role"],
        tool_calls=_CALLS,
        reasoning_content=_REASONING,
        reasoning=_REASONING,
        **{name: {"description": "What a client has added to the message; not looked at."} for name in BY_CLIENTS},
    ),
]
_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function", "description": "What kind of tool it is."},
        "function": {
            "type": "object",
            "properties": {
                "name": TEXT | {"pattern": f"^{NAME.pattern}$", "description": "Its name, which no other tool has."},
                "description": {"type": ["string", "null"], "maxLength": MAX_DESCRIPTION, "description": "What it does."},
                "parameters": {
                    "type": ["object", "null"],
                    "description": "A JSON schema (draft 2020-12) of its arguments, which are an object.",
                },
                **{
                    name: {"type": ["object", "null"], "description": "A schema of what it gives back, for templates."}
                    for name in RESULTS
                },
                "strict": {"type": ["boolean", "null"], "description": "Arguments always obey the schema. Default: false."},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
_CHOICE: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function", "description": "A function by its name."},
        "function": {"type": "object", "properties": {"name": TEXT}, "required": ["name"], "additionalProperties": False},
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
NOTES: dict[str, Note] = {
    "messages": Note(
        f"The conversation, 1 to {MAX_MESSAGES} messages, written as a prompt by the checkpoint's chat template.",
        shapes=(listed({"anyOf": MESSAGES}, minItems=1, maxItems=MAX_MESSAGES),),
        required=True,
    ),
    "chat_template_kwargs": Note("What the chat template takes beside the messages. Default: nothing."),
    "tools": Note(
        f"Functions that the model may call: at most {MAX_TOOLS}, their schemas at most {MAX_SCHEMA_BYTES} bytes in all, "
        "64 KiB where calls are enforced. Default: none.",
        shapes=(listed(_TOOL, maxItems=MAX_TOOLS),),
    ),
    "tool_choice": Note(
        "`none`: the tools are not shown to the model. `required`, or a function by its name: the answer is calls, whose "
        "arguments obey the schemas. Default: `auto`, the model decides; then only calls of `strict` tools are held to obey.",
        shapes=({"enum": list(CHOICES)}, _CHOICE),
    ),
    "parallel_tool_calls": Note("An answer may hold more than one call.", default=True),
    "reasoning_effort": Note(
        "How much the model is to reason, where its chat template knows such a thing. A template that can only leave reasoning "
        "out does so for `none`. Default: the template's.",
        shapes=({"enum": list(EFFORTS)},),
    ),
}
"""By a field's name."""
