"""Attacks that are one POST, sent again and again: what is in its body makes the work."""

import gzip
import itertools
import json
import random
from functools import cache
from typing import Any

from loadtest.faults.attack import Flood, add_floods

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
MIB = 1 << 20
EACH = ("each",)
USER = {"role": "user", "content": "hello there"}
_numbers = itertools.count()


def completion_body(**fields: Any) -> dict[str, Any]:
    """A short completion with more fields."""
    return {"prompt": "a", "max_tokens": 4} | fields


def structured_body(**how: Any) -> dict[str, Any]:
    """A short completion whose form is enforced."""
    return completion_body(structured_outputs=how)


@cache
def bomb() -> bytes:
    """64 MiB of spaces in 64 KB."""
    return gzip.compress(b" " * (64 * MIB))


@cache
def many_ids() -> bytes:
    """1 MB of token ids."""
    drawn = random.Random(0)
    return json.dumps({"prompt": [drawn.randrange(1000, 8000) for _ in range(170_000)], "max_tokens": 1}).encode()


def slow_schema() -> dict[str, Any]:
    """A JSON schema that takes about a second to compile or to be refused, another one each time."""
    return structured_body(json={"type": "integer", "multipleOf": 100_000_007 + 2 * next(_numbers)})


def new_prompt(**fields: Any) -> dict[str, Any]:
    """A prompt of 900 tokens that nobody has cached."""
    number = next(_numbers)
    return {"prompt": [100 + (number * 7919 + index * 31) % 7000 for index in range(900)], "max_tokens": 1} | fields


def answers(prompts: int, tokens: int, text: str = "def f(", **fields: Any) -> dict[str, Any]:
    """8 answers for each of so many prompts, of so many tokens each."""
    return {"prompt": [text] * prompts, "n": 8, "max_tokens": tokens, "ignore_eos": True} | fields


def tools(count: int, properties: int) -> list[dict[str, Any]]:
    """Tools whose schemas have so many properties each."""
    text = {"type": "string", "description": "what it is, told in so many words that all of them are a MB"}
    schema = {"type": "object", "properties": {f"property_{number}": text for number in range(properties)}}
    return [{"type": "function", "function": {"name": f"tool_{number}", "parameters": schema}} for number in range(count)]


def grammar() -> dict[str, Any]:
    """Another grammar each time: with many states, ambiguous, recursive, of many alternatives, or with much to choose from."""
    number = next(_numbers)
    chain = "\n".join(f"r{index}: r{index + 1} | r{index + 1} r{index + 1}" for index in range(300))
    together = {"allOf": [{"anyOf": [{"pattern": f"^a{{{index},}}b{number}"}, {"type": "null"}]} for index in range(30)]}
    alike = {"anyOf": [{"type": "object", "properties": {f"a{number}": {"const": index}}} for index in range(300)]}
    ways: tuple[dict[str, Any], ...] = (
        {"regex": f"((((a?){{{20 + number % 9}}}){{20}}){{20}})b{number}"},
        {"regex": f"(a|aa|aaa|b{number})*c.{{200}}"},
        {"grammar": f'start: start start | "a" | "{number}"'},
        {"grammar": f'start: r0\n{chain}\nr300: "a" | "{number}"'},
        {"json": alike},
        {"json": together},
        {"choice": [f"{number} choice {index} of them" for index in range(5000)]},
    )
    return structured_body(**ways[number % len(ways)])


def unknown_fields() -> dict[str, Any]:
    """2000 fields that nobody knows, others each time."""
    number = next(_numbers)
    return completion_body(**{f"unknown_{number}_{index}": index for index in range(2000)})


def odd_text() -> dict[str, Any]:
    """A text of 60 KB that tokenizers dislike: one word, marks on marks, joined faces, one that grows when it is normalised."""
    texts = ("a", "a" + "\u0301\u0323" * 40, "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d", "\ufdfa", "\u0130\u0307")
    return {"prompt": (texts[next(_numbers) % len(texts)] * 60_000)[:20_000]}


def embeddings_body() -> dict[str, Any]:
    """512 texts that nobody has cached."""
    number = next(_numbers)
    return {"input": [f"{number} {index} " + "word " * 100 for index in range(512)]}


WORDS = [f"word number {index} of the forbidden ones" for index in range(64)]
BAD_WORDS = {"prompt": [f"prompt {index}" for index in range(16)], "n": 8, "max_tokens": 1, "bad_words": WORDS}
TABLES: dict[str, Any] = {
    "logit_bias": {str(token): 1 for token in range(300)},
    "allowed_token_ids": [*range(8000)],
    "stop_token_ids": [*range(7000, 7300)],
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "top_p": 0.95,
    "top_k": 8000,
    "min_p": 0.001,
    "stop": [" " * 255 + mark for mark in "abcd"],
}
EXPLAINED = {
    "prompt": [128 + i % 512 for i in range(512)],
    "layers": [0],
    "heads": [0, 1, 2],
    "top_logprobs": 20,
    "logit_lens": 5,
}
TEXT = ("lorem ipsum dolor " * (MIB // 18))[: MIB - 200]
MANY_TEXTS = {"prompt": [f"{index} " + "word " * 790 for index in range(128)], "max_tokens": 1}
REFUSED = json.dumps({"messages": [USER] * 8000, "max_tokens": "many"}).encode()
TOOL_CALL = {"messages": [USER], "max_tokens": 4, "tools": tools(60, 130), "tool_choice": "required"}
MASKED = answers(8, 64, response_format={"type": "json_object"}, top_p=0.95)
LARGE = {"prompt": [[7] * 1000] * 40, "max_tokens": 1, "prompt_logprobs": 20}
WRONG = b'{"prompt":[' + b"{}," * (MIB // 3 - 10) + b"{}]}"
ARGUMENTS = {"messages": [USER], "max_tokens": 1, "chat_template_kwargs": {"given": [["a"] * 10] * 4000}}
STREAMS = answers(16, 200, stream=True, logprobs=5, stream_options={"continuous_usage_stats": True})
LONG = completion_body(max_tokens=400, ignore_eos=True)
UNKNOWN = {"authorization": "Bearer wrong"}
GZIP = {"content-encoding": "gzip"}

add_floods(
    {
        "bad words": Flood("64 bad words for 16 prompts of 8 answers", COMPLETIONS, BAD_WORDS, 2, fills=True),
        "slow grammars": Flood("64 schemas at a time that take a second each to compile", COMPLETIONS, slow_schema, 64),
        "slow grammars of a limited key": Flood(
            "322 of them with a key that is at its limit", COMPLETIONS, slow_schema, 322, EACH, key="limited"
        ),
        "large grammars": Flood("grammars of many states, alternatives or choices, 16 at a time", COMPLETIONS, grammar, 16),
        "masks with top p": Flood("64 JSON answers with top_p", COMPLETIONS, MASKED, 2, fills=True),
        "tables of every answer": Flood(
            "64 answers with 300 biases, 8000 allowed tokens, stop strings and every limit of sampling",
            COMPLETIONS,
            answers(8, 128, " " * 200, **TABLES),
            2,
            fills=True,
        ),
        "large log probabilities": Flood("answers of 55 MB, 2 at a time", COMPLETIONS, LARGE, 2, fills=True),
        "wrong bodies": Flood("1 MiB of JSON that is wrong half a million times", COMPLETIONS, WRONG, 4),
        "deep bodies": Flood("1 MiB of brackets", COMPLETIONS, b'{"prompt":' + b"[" * (MIB - 20), 4),
        "refused bodies": Flood("chats of 8000 messages with a wrong field, 250 at a time", CHAT, REFUSED, 250),
        "bodies at the limit": Flood("1 MB of token ids, 8 at a time", COMPLETIONS, many_ids, 8),
        "gzip bombs": Flood("64 MiB in 64 KB of gzip, 16 at a time", COMPLETIONS, bomb, 16, headers=GZIP),
        "unknown fields": Flood("2000 unknown fields, others each time, 8 at a time", COMPLETIONS, unknown_fields, 8),
        "template arguments": Flood("600 KB of arguments for the chat template", CHAT, ARGUMENTS, 4),
        "enforced tool schemas": Flood("1 MB of tools one of which must be called, 4 at a time", CHAT, TOOL_CALL, 4),
        "long prompts": Flood(
            "prompts of 900 tokens that nobody has cached, 16 at a time", COMPLETIONS, new_prompt, 16, fills=True
        ),
        "texts too long": Flood("1 MiB of text to be tokenized, 8 at a time", TOKENIZE, {"prompt": TEXT}, 8),
        "odd texts": Flood("60 KB of one word, or of marks on marks, to be tokenized, 16 at a time", TOKENIZE, odd_text, 16),
        "long detokenizing": Flood(
            "200,000 tokens to be made a text, 8 at a time", "/detokenize", {"tokens": [300] * 200_000}, 8
        ),
        "many prompts": Flood("lists of 128 prompts of 4000 characters, 4 at a time", COMPLETIONS, MANY_TEXTS, 4, fills=True),
        "a hog": Flood("128 answers of 900 tokens, 3 at a time", COMPLETIONS, answers(16, 900), 3, fills=True),
        "streams of many answers": Flood(
            "streams of 128 answers with log probabilities and counts, 4 at a time", COMPLETIONS, STREAMS, 4, fills=True
        ),
        "highest priority": Flood(
            "answers of 400 tokens with priority 9, 64 at a time", COMPLETIONS, LONG | {"priority": 9}, 64, fills=True
        ),
        "short deadlines": Flood(
            "answers of 400 tokens with a deadline of 1 ms, 64 at a time", COMPLETIONS, LONG | {"deadline_ms": 1}, 64
        ),
        "overload with one header": Flood("320 callers at once with the same header", COMPLETIONS, LONG, 320, fills=True),
        "embeddings": Flood("512 texts to embed, 4 at a time", "/v1/embeddings", embeddings_body, 4, fills=True),
        "explained texts": Flood("/v1/attention of 512 tokens with all weights, 8 at a time", "/v1/attention", EXPLAINED, 8),
        "errors": Flood("calls that are refused with 400, 32 at a time", COMPLETIONS, {"prompt": 1}, 32),
        "wrong keys": Flood(
            "calls with a key that is not known, 32 at a time", COMPLETIONS, LONG, 32, ("each", "shared"), headers=UNKNOWN
        ),
    }
)
