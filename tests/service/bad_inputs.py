"""The project's own table of bad inputs: what is sent, on which transport, and what must be said about it.

Every row is bad for every server, whatever its model: `test_bad_inputs.py` sends them to the fakes and to a real server.
"""

from tests.service.bad_blocks import MESSAGE_ROWS, RESPONSE_ROWS
from tests.service.bad_calls import CHAT, COMPLETIONS, EMBEDDINGS, JSON, RERANK, SCORE
from tests.service.bad_rows import GOOD, SECRET, UNSUPPORTED, A, both, chat, completion, embeds, grpc, http, keyless, says
from tests.service.bad_syntax import ENCODING, HEADERS, STRUCTURE, TYPES, WIRE
from tests.service.bad_tools import TOOLS
from tests.service.bad_values import COMBINATIONS, LIMITS, RANGES, TOKENS

CONVERSATIONS = [
    http("messages: none", {}, "messages", "messages is required", path=CHAT),
    chat("messages: an empty list", {"messages": []}, "messages", "1 to 2048"),
    chat("messages: too many", {"messages": [{"role": "user", "content": ""}] * 2049}, "messages", "1 to 2048"),
    says("messages: no role", {"content": "a"}, "messages[1].role", "required"),
    says("messages: an unknown role", {"role": "robot", "content": "a"}, "messages[1].role", "'developer'"),
    says("messages: a number for content", {"role": "user", "content": 4}, "messages[1].content", "string"),
    says("messages: a part that is a string", {"role": "user", "content": ["a"]}, "messages[1].content[0]", "object"),
    says(
        "messages: a picture",
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://h/"}}]},
        "messages[1].content[0].type",
        "a text",
        UNSUPPORTED,
    ),
    says("messages: a mistyped field", {"role": "user", "content": "a", "contant": "b"}, "messages[1].contant", "not a field"),
    chat("messages: a prompt", {"prompt": "a"}, "prompt", "use messages", UNSUPPORTED),
    chat("messages: a template", {"chat_template": "{{ 7 * 7 }}"}, "chat_template", "--chat-template", UNSUPPORTED),
    chat("messages: an unknown model", {"model": "no-such-model"}, "model", "does not exist", "model_not_found"),
]
STRUCTURED = [
    completion("structured: an unknown format", {"response_format": {"type": "xml"}}, "response_format", "one of text"),
    completion("structured: a string for the format", {"response_format": "json"}, "response_format", "object"),
    completion(
        "structured: two kinds", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "must hold one"
    ),
    completion(
        "structured: a mistyped kind", {"structured_outputs": {"gramar": "a"}}, "structured_outputs.gramar", "mean grammar"
    ),
    completion("structured: no choices", {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 1000"),
    both(
        "structured: an open group",
        {"structured_outputs": {"regex": "a(b"}},
        {"decoding": {"regex": "a(b"}},
        "structured_outputs.regex",
        "unclosed group",
    ),
    both(
        "structured: a bomb",
        {"structured_outputs": {"regex": "((a{999}){999}){999}"}},
        {"decoding": {"regex": "((a{999}){999}){999}"}},
        "structured_outputs.regex",
        "regex",
    ),
    both(
        "structured: 64 KiB and a byte",
        {"structured_outputs": {"regex": "a" * 65537}},
        {"decoding": {"regex": "a" * 65537}},
        "structured_outputs.regex",
        "65536",
    ),
    both(
        "structured: a grammar of itself alone",
        {"structured_outputs": {"grammar": "start: start"}},
        {"decoding": {"grammar": "start: start"}},
        "structured_outputs.grammar",
        "no text",
    ),
    both(
        "structured: no JSON",
        {"structured_outputs": {"json": "{"}},
        {"decoding": {"json_schema": "{"}},
        "structured_outputs.json",
        "Expecting",
    ),
    both(
        "structured: a schema in a file",
        {"structured_outputs": {"json": {"$ref": "file:///etc/passwd"}}},
        {"decoding": {"json_schema": '{"$ref": "file:///etc/passwd"}'}},
        "structured_outputs.json",
        "registry",
    ),
    both(
        "structured: a schema that never ends",
        {"structured_outputs": {"json": {"type": "integer", "multipleOf": 100000007}}},
        {"decoding": {"json_schema": '{"type": "integer", "multipleOf": 100000007}'}},
        "structured_outputs.json",
        "too complex",
    ),
]
EMBEDDING = [
    http("embeddings: none", {}, "input", "input is required", path=EMBEDDINGS),
    http("embeddings: another format", {"input": "a", "encoding_format": "hex"}, "encoding_format", "base64", path=EMBEDDINGS),
    embeds("embeddings: too many", {"input": ["a"] * 2049}, {"inputs": [{"text": "a"}] * 2049}, "input", "2048"),
    embeds("embeddings: no tokens", {"input": [[]]}, {"inputs": [{"token_ids": {}}]}, "input", "empty list"),
    embeds("embeddings: no dimensions", {"dimensions": 0}, {"dimensions": 0}, "dimensions", "from 1"),
    embeds(
        "embeddings: cut to nothing",
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": 0},
        "truncate_prompt_tokens",
        "from 1",
    ),
]
PAIR: dict[str, object] = {"query": "a", "documents": ["b"]}
SCORES = [
    http("rerank: no query", {"documents": ["b"]}, "query", "query is required", path=RERANK),
    http("rerank: an empty list", PAIR | {"documents": []}, "documents", "at least 1", path=RERANK),
    http("rerank: a number among them", PAIR | {"documents": ["b", 3]}, "documents", "documents[1]", path=RERANK),
    http("rerank: a list of queries", PAIR | {"query": ["a"]}, "query", "a string", path=RERANK),
    http("rerank: cut to nothing", PAIR | {"max_tokens_per_doc": 0}, "max_tokens_per_doc", "from 1", path=RERANK),
    http("score: one text", {"text_1": "a"}, "text_2", "text_2 is required", path=SCORE),
    http("score: lists that do not fit", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "as many as text_2", path=SCORE),
    http("score: a text under both names", {"text_1": "a", "text_2": "b", "documents": "b"}, "documents", "text_2", path=SCORE),
]
KEYS = [
    keyless("none", None, "needs an API key"),
    keyless("another scheme", "Basic YTpi", "needs an API key"),
    keyless("another one", "Bearer att_of-somebody-else", "not known"),
    http(
        "keys: none for the models",
        b"",
        None,
        "needs an API key",
        "invalid_api_key",
        method="GET",
        path="/v1/models",
        keyed=True,
    ),
    http(
        "keys: in the address",
        A,
        None,
        "needs an API key",
        "invalid_api_key",
        path=f"{COMPLETIONS}?api_key={SECRET}",
        keyed=True,
    ),
    http(
        "keys: two that are not known",
        A,
        None,
        "in Authorization and that in x-api-key are not known",
        "invalid_api_key",
        headers=JSON | {"authorization": f"Bearer {SECRET}y", "x-api-key": f"{SECRET}x"},
        keyed=True,
    ),
    grpc(
        "keys: two",
        GOOD,
        "send one API key: there is more than one",
        "invalid_api_key",
        metadata=(("authorization", f"Bearer {SECRET}"),) * 2,
        keyed=True,
    ),
    grpc("keys: none to tokenize over gRPC", b"", "needs an API key", "invalid_api_key", rpc="Tokenize", keyed=True),
    grpc(
        "keys: none, and bytes that are no message",
        b"\xff",
        "needs an API key",
        "invalid_api_key",
        rpc="GenerateStream",
        keyed=True,
    ),
]
ROWS = (
    *(*ENCODING, *STRUCTURE, *TYPES, *HEADERS),
    *(*RANGES, *COMBINATIONS, *TOKENS, *LIMITS, *CONVERSATIONS, *TOOLS, *STRUCTURED, *EMBEDDING, *SCORES, *WIRE, *KEYS),
    *(*RESPONSE_ROWS, *MESSAGE_ROWS),
)
