"""The project's own table of bad inputs: what is sent, on which transport, and what must be said about it.

Every row is bad for every server, whatever its model: `test_bad_inputs.py` sends them to the fakes and to a real server.
"""

from attend.v1 import generation_pb2 as pb
from tests.service.bad_blocks import MESSAGE_ROWS, RESPONSE_ROWS
from tests.service.bad_calls import CHAT, COMPLETIONS, EMBEDDINGS, JSON, RERANK, SCORE, TOKENIZE
from tests.service.bad_rows import GOOD, SECRET, UNSUPPORTED, A, both, chat, completion, embeds, grpc, http, keyless, says
from tests.service.bad_syntax import ENCODING, HEADERS, STRUCTURE, TYPES, WIRE
from tests.service.bad_tools import TOOLS
from tests.service.bad_values import COMBINATIONS, LIMITS, RANGES, TOKENS

CONVERSATIONS = [
    http("messages: none", {}, "messages", "messages is required", path=CHAT),
    chat("messages: an empty list", {"messages": []}, "messages", "at least 1"),
    chat("messages: too many", {"messages": [{"role": "user", "content": ""}] * 2049}, "messages", "at most 2048"),
    chat("messages: a string", {"messages": "hello"}, "messages", "list"),
    says("messages: one that is a string", "hello", "messages[1]", "object"),
    says("messages: no role", {"content": "a"}, "messages[1].role", "required"),
    says("messages: an unknown role", {"role": "robot", "content": "a"}, "messages[1].role", "or 'tool'"),
    says("messages: a role in capitals", {"role": "USER", "content": "a"}, "messages[1].role", "or 'tool'"),
    says("messages: a role that is a list", {"role": ["user"], "content": "a"}, "messages[1].role", "or 'tool'"),
    says("messages: no content", {"role": "user"}, "messages[1].content", "required"),
    says("messages: a number for content", {"role": "user", "content": 4}, "messages[1].content", "string"),
    says("messages: a part that is a string", {"role": "user", "content": ["a"]}, "messages[1].content[0]", "object"),
    says(
        "messages: a part without text",
        {"role": "user", "content": [{"type": "text"}]},
        "messages[1].content[0].text",
        "required",
    ),
    says(
        "messages: a picture",
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://h/"}}]},
        "messages[1].content[0].type",
        "a text",
        UNSUPPORTED,
    ),
    says("messages: a mistyped field", {"role": "user", "content": "a", "contant": "b"}, "messages[1].contant", "not a field"),
    says("messages: a long name", {"role": "user", "content": "a", "name": "n" * 257}, "messages[1].name", "256"),
    chat("messages: a prompt", {"prompt": "a"}, "prompt", "use messages", UNSUPPORTED),
    chat("messages: an option of no template", {"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs", "not an option"),
    chat("messages: a template", {"chat_template": "{{ 7 * 7 }}"}, "chat_template", "--chat-template", UNSUPPORTED),
    chat("messages: an empty model", {"model": ""}, "model", "name of a model"),
    chat("messages: an unknown model", {"model": "no-such-model"}, "model", "does not exist", "model_not_found"),
    chat("messages: log probabilities by number", {"logprobs": 3}, "logprobs", "boolean"),
]
STRUCTURED = [
    completion("structured: an unknown format", {"response_format": {"type": "xml"}}, "response_format", "one of text"),
    completion("structured: a format without a type", {"response_format": {}}, "response_format", "one of"),
    completion("structured: a string for the format", {"response_format": "json"}, "response_format", "object"),
    completion(
        "structured: no schema", {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"
    ),
    completion(
        "structured: a structural tag",
        {"structured_outputs": {"structural_tag": "{}"}},
        "structural_tag",
        "not supported",
        UNSUPPORTED,
    ),
    completion("structured: a list for the schema", {"structured_outputs": {"json": []}}, "structured_outputs.json", "object"),
    completion(
        "structured: two kinds", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "must hold one"
    ),
    completion(
        "structured: a mistyped kind", {"structured_outputs": {"gramar": "a"}}, "structured_outputs.gramar", "mean grammar"
    ),
    completion(
        "structured: a number for the regex", {"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "string"
    ),
    completion(
        "structured: false for the regex", {"structured_outputs": {"regex": False}}, "structured_outputs.regex", "string"
    ),
    completion(
        "structured: a number for the schema's name",
        {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
        "response_format.json_schema.name",
        "string",
    ),
    completion(
        "structured: a string for strict",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": "yes", "schema": {}}}},
        "response_format.json_schema.strict",
        "boolean",
    ),
    completion(
        "structured: an object for the choices",
        {"structured_outputs": {"choice": {"a": 1}}},
        "structured_outputs.choice",
        "(object)",
    ),
    completion("structured: no choices", {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 1000"),
    completion(
        "structured: an empty choice", {"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "choice[1]"
    ),
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
        "structured: an empty regex",
        {"structured_outputs": {"regex": ""}},
        {"decoding": {"regex": ""}},
        "structured_outputs.regex",
        "empty",
    ),
    both(
        "structured: 64 KiB and a byte",
        {"structured_outputs": {"regex": "a" * 65537}},
        {"decoding": {"regex": "a" * 65537}},
        "structured_outputs.regex",
        "65536",
    ),
    both(
        "structured: half a grammar",
        {"structured_outputs": {"grammar": "start: ("}},
        {"decoding": {"grammar": "start: ("}},
        "structured_outputs.grammar",
        "grammar",
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
        "structured: a schema of nothing",
        {"structured_outputs": {"json": {"enum": []}}},
        {"decoding": {"json_schema": '{"enum": []}'}},
        "structured_outputs.json",
        "nsatisfiable",
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
    grpc(
        "structured: no choices over gRPC",
        pb.GenerateRequest(text="a", decoding={"choice": {}}).SerializeToString(),
        "1 to 1000",
    ),
]
EMBEDDING = [
    http("embeddings: none", {}, "input", "input is required", path=EMBEDDINGS),
    http("embeddings: a number", {"input": 3}, "input", "string", path=EMBEDDINGS),
    http("embeddings: a prompt", {"prompt": "a"}, "input", "input is required", path=EMBEDDINGS),
    http("embeddings: another format", {"input": "a", "encoding_format": "hex"}, "encoding_format", "base64", path=EMBEDDINGS),
    embeds("embeddings: an empty list", {"input": []}, {"inputs": []}, "input", "1 to 2048"),
    embeds("embeddings: too many", {"input": ["a"] * 2049}, {"inputs": [{"text": "a"}] * 2049}, "input", "2048"),
    embeds("embeddings: no tokens", {"input": [[]]}, {"inputs": [{"token_ids": {}}]}, "input", "empty list"),
    embeds("embeddings: a token below zero", {"input": [-1]}, {"inputs": [{"token_ids": {"ids": [-1]}}]}, "input", "from 0"),
    embeds("embeddings: no dimensions", {"dimensions": 0}, {"dimensions": 0}, "dimensions", "from 1"),
    embeds("embeddings: far too many dimensions", {"dimensions": 2**40}, {"dimensions": 2**40}, "dimensions", "from 1"),
    embeds("embeddings: a deadline of nothing", {"deadline_ms": 0}, {"deadline_ms": 0}, "deadline_ms", "from 1"),
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
    http("rerank: no documents", {"query": "a"}, "documents", "documents is required", path=RERANK),
    http("rerank: an empty list", PAIR | {"documents": []}, "documents", "at least 1", path=RERANK),
    http("rerank: too many", PAIR | {"documents": ["b"] * 2049}, "documents", "at most 2048", path=RERANK),
    http("rerank: one text", PAIR | {"documents": "b"}, "documents", "list", path=RERANK),
    http("rerank: a number among them", PAIR | {"documents": ["b", 3]}, "documents", "documents[1]", path=RERANK),
    http("rerank: an object without a text", PAIR | {"documents": [{}]}, "documents[0].text", "text", path=RERANK),
    http("rerank: a list of queries", PAIR | {"query": ["a"]}, "query", "a string", path=RERANK),
    http("rerank: fewer than none", PAIR | {"top_n": -1}, "top_n", "from 0", path=RERANK),
    http("rerank: a word for a number", PAIR | {"top_n": "3"}, "top_n", "an integer", path=RERANK),
    http("rerank: cut to nothing", PAIR | {"max_tokens_per_doc": 0}, "max_tokens_per_doc", "from 1", path=RERANK),
    http("rerank: a deadline of nothing", PAIR | {"deadline_ms": 0}, "deadline_ms", "from 1", path=RERANK),
    http("rerank: an id with spaces", PAIR | {"request_id": "a b"}, "request_id", "letters", path=RERANK),
    http("score: one text", {"text_1": "a"}, "text_2", "text_2 is required", path=SCORE),
    http("score: an empty list", {"text_1": "a", "text_2": []}, "text_2", "at least 1", path=SCORE),
    http("score: lists that do not fit", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "as many as text_2", path=SCORE),
    http("score: a text under both names", {"text_1": "a", "text_2": "b", "documents": "b"}, "documents", "text_2", path=SCORE),
    http("score: token ids", {"text_1": [1, 2], "text_2": "b"}, "text_1", "a string", path=SCORE),
]
KEYS = [
    keyless("none", None, "needs an API key"),
    keyless("an empty one", "Bearer ", "needs an API key"),
    keyless("a scheme alone", "Bearer", "needs an API key"),
    keyless("another scheme", "Basic YTpi", "needs an API key"),
    keyless("no scheme", f"{SECRET}", "needs an API key"),
    keyless("another one", "Bearer att_of-somebody-else", "not known"),
    keyless("half of one", f"Bearer {SECRET[:-4]}", "not known"),
    keyless("one and more", f"Bearer {SECRET}x", "not known"),
    keyless("two in one", f"Bearer {SECRET},{SECRET}", "not known"),
    keyless("one of ten thousand characters", "Bearer " + "k" * 10_000, "not known"),
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
    http("keys: none to tokenize", A, None, "needs an API key", "invalid_api_key", path=TOKENIZE, keyed=True),
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
        "keys: a good one in a header that is none",
        A,
        None,
        "needs an API key",
        "invalid_api_key",
        headers=JSON | {"api-key": SECRET},
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
    http("keys: none, and a body that is none", b"{", None, "needs an API key", "invalid_api_key", path=CHAT, keyed=True),
    grpc(
        "keys: two",
        GOOD,
        "send one API key: there is more than one",
        "invalid_api_key",
        metadata=(("authorization", f"Bearer {SECRET}"),) * 2,
        keyed=True,
    ),
    grpc("keys: none to tokenize over gRPC", b"", "needs an API key", "invalid_api_key", rpc="Tokenize", keyed=True),
    grpc("keys: none to detokenize over gRPC", b"", "needs an API key", "invalid_api_key", rpc="Detokenize", keyed=True),
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
