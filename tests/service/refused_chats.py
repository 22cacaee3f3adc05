"""Rows of the table of what is refused (`refused.py`): conversations and tools of each API, embeddings and scores."""

from typing import Any

from tests.service.bad_calls import CHAT, EMBEDDINGS, RERANK, SCORE
from tests.service.refused import COUNT, MESSAGES, MODEL, RESPONSES, SAID, UNSUPPORTED, http, row

TEXT = {"type": "text", "text": "a"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED, OUTPUT = {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c2", "content": "4"}
SCHEMA = "tools[0].function.parameters"


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    """A tool, as OpenAI's clients send it."""
    return {"type": "function", "function": {"name": name} | function}


def called(**changes: Any) -> dict[str, Any]:
    """An assistant's message with a call that is changed."""
    return {"role": "assistant", "tool_calls": [CALL | {"function": CALL["function"] | changes}]}


MISTAKES: list[tuple[Any, ...]] = [
    (None, "", "object"),
    ("hi", "", "object"),
    ({"content": "a"}, ".role", "role"),
    ({"role": 1, "content": "a"}, ".role", "1 (integer)"),
    ({"role": "robot", "content": "a"}, ".role", "'developer'"),
    ({"role": ["user"], "content": "a"}, ".role", "(list)"),
    ({"role": "user"}, ".content", "is required"),
    ({"role": "user", "content": 4}, ".content", "string"),
    ({"role": "user", "content": {"text": "a"}}, ".content", "(object)"),
    ({"role": "user", "content": ["a"]}, ".content[0]", "object"),
    ({"role": "user", "content": [TEXT, {}]}, ".content[1].type", "is required"),
    ({"role": "user", "content": [TEXT, {"type": "image_url"}]}, ".content[1].type", "a text", UNSUPPORTED),
    ({"role": "user", "content": [{"type": "input_audio"}]}, ".content[0].type", "'input_audio'", UNSUPPORTED),
    ({"role": "user", "content": [{"type": "text", "text": 1}]}, ".content[0].text", "1 (integer)"),
    ({"role": "user", "content": "a", "name": "x" * 257}, ".name", "256 characters"),
    ({"role": "user", "content": "a", "contant": "b"}, ".contant", "mean content"),
    ({"role": "user", "content": "a", "function_call": {"name": "f"}}, ".function_call", "not supported", UNSUPPORTED),
    ({"role": "user", "content": "a", "reasoning": "x"}, ".reasoning", "not supported", UNSUPPORTED),
    ({"role": "user", "content": "x", "parsed": 1}, ".parsed", "not supported", UNSUPPORTED),
    ({"role": "user", "content": "a", "tool_calls": [CALL]}, ".tool_calls", "not supported", UNSUPPORTED),
    ({"role": "user", "content": "a", "tool_call_id": "c"}, ".tool_call_id", "not a field"),
    ({"role": "tool", "content": "4"}, ".tool_call_id", "is required"),
    (OUTPUT, ".tool_call_id", "must be the id of a call in an assistant's message before this one; got 'c2'"),
    ({"role": "assistant", "reasoning": 1}, ".reasoning", "a string"),
    ({"role": "assistant", "tool_calls": {}}, ".tool_calls", "a list"),
    ({"role": "assistant", "tool_calls": [1]}, ".tool_calls[0]", "an object"),
    ({"role": "assistant", "tool_calls": [{"id": "c"}]}, ".tool_calls[0].function", "is required"),
    ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, ".tool_calls[0].type", "'function'"),
    ({"role": "assistant", "tool_calls": [CALL | {"id": 1}]}, ".tool_calls[0].id", "a string"),
    ({"role": "assistant", "tool_calls": [CALL] * 129}, ".tool_calls", "at most 128"),
    (called(name=1), ".tool_calls[0].function.name", "a string"),
    (called(arguments={}), ".tool_calls[0].function.arguments", "a string"),
]
CHATS: list[tuple[Any, ...]] = [
    *[({"messages": [SAID, given]}, f"messages[1]{place}", *rest) for given, place, *rest in MISTAKES],
    ({"messages": [SAID, CALLED, OUTPUT]}, "messages[2].tool_call_id", "got 'c2'"),
    ({"messages": []}, "messages", "1 to 2048"),
    ({"messages": [SAID] * 2049}, "messages", "1 to 2048"),
    ({"messages": "hi"}, "messages", "a list"),
    ({"messages": None}, "messages", "messages is required"),
    ({"messages": [SAID], "continue_final_message": True}, "messages", "the last message must be an assistant's"),
    ({"prompt": "a"}, "prompt", "use messages", UNSUPPORTED),
    ({"chat_template": "{{ 7 * 7 }}"}, "chat_template", "--chat-template", UNSUPPORTED),
    ({"functions": [{"name": "f"}]}, "functions", "use tools", UNSUPPORTED),
    ({"model": "no-such-model"}, "model", "does not exist", MODEL),
    ({"n": 9}, "n", "from 1 to 8"),
    ({"max_tokens": 0}, "max_tokens", "from 1 to"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "from 0 to 2"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "equal"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    ({"top_logprobs": 1}, "top_logprobs", "logprobs is true"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "one of none"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "does not read it", UNSUPPORTED),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "not an option"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "object"),
    # tools
    ({"tools": {}}, "tools", "must be a list"),
    ({"tools": [1]}, "tools[0]", "must be an object"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is required"),
    ({"tools": [tool("two words")]}, "tools[0].function.name", "must be 1 to 128 letters"),
    ({"tools": [tool("x" * 129)]}, "tools[0].function.name", "must be 1 to 128 letters"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name", "no other tool"),
    ({"tools": [tool(description=1)]}, "tools[0].function.description", "must be a string"),
    ({"tools": [tool(description="x" * (1 << 17))]}, "tools[0].function.description", "at most 65536"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", "must be a boolean"),
    ({"tools": [tool(response="x")]}, "tools[0].function.response", "of what the function gives back"),
    ({"tools": [tool(parameters="x")]}, SCHEMA, "must be a JSON schema of an object"),
    ({"tools": [tool(parameters={"type": "string"})]}, SCHEMA, "must be a JSON schema of an object"),
    ({"tools": [tool(parameters={"title": "x" * (1 << 19)})]}, "tools", "may have schemas of at most 262144 bytes in all"),
    ({"tools": [tool(f"f{number}") for number in range(500)]}, "tools", "at most 128"),
    ({"tools": [tool(strict=True, parameters={"properties": {"a": {"type": "text"}}})]}, SCHEMA, "no JSON schema"),
    (
        {"tools": [tool(parameters={"properties": {"a": {"pattern": "(?!x)"}}})], "tool_choice": "required"},
        "tools",
        f"{SCHEMA}.properties.a.pattern: ",
    ),
    ({"tools": [tool()], "tool_choice": "always"}, "tool_choice", "'auto', 'none' or 'required'"),
    ({"tools": [tool()], "tool_choice": 1}, "tool_choice", "'auto', 'none' or 'required'"),
    ({"tools": [tool()], "tool_choice": tool("g")}, "tool_choice.function.name", "name must be the name of one of the tools"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [tool()], "tool_choice": "required", "min_tokens": 3}, "min_tokens", "structured output"),
]
TEXTS = [
    http({}, "input", "input is required", path=EMBEDDINGS),
    row({"encoding_format": "hex"}, "encoding_format", "base64", path=EMBEDDINGS),
    row({"input": ["a"] * 2049}, "input", "2048", path=EMBEDDINGS),
    row({"input": [[]]}, "input", "empty list", path=EMBEDDINGS),
    row({"dimensions": 0}, "dimensions", "from 1", path=EMBEDDINGS),
    row({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1", path=EMBEDDINGS),
    http({"documents": ["b"]}, "query", "query is required", path=RERANK),
    http({"query": "a", "documents": []}, "documents", "at least 1", path=RERANK),
    http({"query": "a", "documents": ["b", 3]}, "documents", "documents[1]", path=RERANK),
    http({"query": ["a"], "documents": ["b"]}, "query", "a string", path=RERANK),
    http({"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", "from 1", path=RERANK),
    http({"text_1": "a"}, "text_2", "text_2 is required", path=SCORE),
    http({"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "as many as text_2", path=SCORE),
    http({"text_1": "a", "text_2": "b", "documents": "b"}, "documents", "text_2", path=SCORE),
]
FUNCTION = {"type": "function", "name": "f"}
CHOSEN = {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION, FUNCTION | {"name": "g"}]}
ITEMS: list[tuple[Any, ...]] = [
    ({"role": "user", "content": [{"type": "input_image"}]}, ".content[0].type", "no other", UNSUPPORTED),
    ({"type": "item_reference", "id": "x"}, ".type", "not kept here", UNSUPPORTED),
    ({"type": "function_call", "call_id": "c", "arguments": ""}, ".name", "is required"),
    ({"type": "function_call_output", "call_id": "c", "output": ""}, ".call_id", "before this"),
]
OF_RESPONSES: list[tuple[Any, ...]] = [
    *[({"input": [SAID, item]}, f"input[1]{place}", *rest) for item, place, *rest in ITEMS],
    ({"input": None}, "input", "input is required"),
    ({"input": []}, "input", "at least 1 item"),
    ({"input": 3}, "input", "a string, or a list"),
    ({"input": [SAID] * 2049}, "input", "at most 2048"),
    ({"input": [{"type": "web_search_call"}]}, "input", "nothing that the model can be told"),
    ({"previous_response_id": "r"}, "previous_response_id", "whole conversation", UNSUPPORTED),
    ({"conversation": {"id": "c"}}, "conversation", "whole conversation", UNSUPPORTED),
    ({"prompt": {"id": "p"}}, "prompt", "use instructions", UNSUPPORTED),
    ({"background": True}, "background", "ends with its answer", UNSUPPORTED),
    ({"max_output_tokens": 0}, "max_output_tokens", "from 1 to"),
    ({"max_output_token": 3}, "max_output_token", "did you mean max_output_tokens"),
    ({"truncation": 3}, "truncation", "'auto' or 'disabled'"),
    ({"stop": [""]}, "stop", "a string of at least 1 character"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "one of"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is required"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "is required"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name", "no other tool"),
    ({"tools": [FUNCTION | {"parameters": {"type": 3}}]}, "tools[0].parameters", "JSON schema"),
    ({"tools": [FUNCTION], "tool_choice": FUNCTION | {"name": "g"}}, "tool_choice.name", "one of the tools"),
    ({"tools": [FUNCTION], "tool_choice": CHOSEN}, "tool_choice.tools[1].name", "one of the tools"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "structured_outputs.regex"),
]
OWN = {"name": "f", "input_schema": {"type": "object"}}
BLOCKS: list[tuple[Any, ...]] = [
    ({"type": "image", "source": {}}, ".type", "no other", UNSUPPORTED),
    ({"type": "document", "source": {}}, ".type", "no other", UNSUPPORTED),
    ({"type": "tool_result", "tool_use_id": "x"}, ".tool_use_id", "before this one"),
]
OF_MESSAGES: list[tuple[Any, ...]] = [
    *[({"messages": [{"role": "user", "content": [one]}]}, f"messages[0].content[0]{at}", *rest) for one, at, *rest in BLOCKS],
    ({"messages": None}, "messages", "messages is required"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [SAID] * 2049}, "messages", "at most 2048"),
    ({"max_tokens": 0}, "max_tokens", "from 1 to"),
    ({"temperature": 3}, "temperature", "from 0 to 2"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "declare them", UNSUPPORTED),
    ({"compaction": {"type": "enabled"}}, "compaction", "shorten messages", UNSUPPORTED),
    ({"stop": ["x"]}, "stop", "use stop_sequences", UNSUPPORTED),
    ({"output_format": {"type": "json_schema"}}, "output_format", "use output_config.format", UNSUPPORTED),
    ({"stop_sequence": ["x"]}, "stop_sequence", "did you mean stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences", "a string of at least 1 character"),
    ({"thinking": {"type": "enabled", "budget_tokens": "3"}}, "thinking.budget_tokens", "integer"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens", "from 0"),
    ({"thinking_token_budget": -1}, "thinking_token_budget", "from 0"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "is required"),
    ({"tools": [OWN, OWN]}, "tools[1].name", "no other tool"),
    ({"tools": [OWN | {"input_schema": {"type": 3}}]}, "tools[0].input_schema", "JSON schema"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "is required"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    ({"tools": [OWN], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name", "one of the tools"),
]
ROWS = (
    *(row(fields, param, word, *code, path=CHAT) for fields, param, word, *code in CHATS),
    *(row(fields, param, word, *code, path=RESPONSES) for fields, param, word, *code in OF_RESPONSES),
    *(row(fields, param, word, *code, path=MESSAGES) for fields, param, word, *code in OF_MESSAGES),
    *TEXTS,
    row({"model": "other"}, "model", "does not exist", MODEL, COUNT),
)
