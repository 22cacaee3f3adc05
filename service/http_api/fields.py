"""What the fields of the requests mean, their ranges and defaults, as /openapi.json says them.

Names and types come from the bodies' own models. The ranges are enforced in `model/params.py` and `service/records.py`; tests
hold the two together, on both sides of every limit.
"""

from typing import Any

from model.grammar import MAX_CHOICE_CHARACTERS
from model.grammar import MAX_CHOICES as MAX_GRAMMAR_CHOICES
from model.params import (
    DEFAULT_PRIORITY,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_CHOICES_TIMES_PROMPTS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_PROMPT_SCORES,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SEED_HIGH,
    SEED_LOW,
    DecodingParams,
    SamplingParams,
    StopRules,
)
from service.generation.explain import MOST_LENS, MOST_NUMBERS, MOST_TOKENS
from service.http_api import chat_fields
from service.http_api.attention import DEFAULT_TOP
from service.http_api.chat import MAX_TOP_LOGPROBS, NOT_BUILT
from service.http_api.notes import TEXT, Note, Schema, above, between, listed
from service.http_api.openai import DEFAULT_MAX_TOKENS, MAX_COMPLETION_LOGPROBS
from service.http_api.schemas import OFF
from service.records import MAX_DEADLINE_MS, MAX_SALT, REQUEST_ID

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
_SAMPLING, _DECODING, _STOPS = SamplingParams(), DecodingParams(), StopRules()


TOKEN: Schema = {"type": "integer", "minimum": 0}
_TOKENS = "Token ids are from 0 to one below `vocab_size` of /tokenizer_info."
_STOP_TEXT: Schema = TEXT | {"minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_PROMPTS = {"minItems": 1, "maxItems": MAX_CHOICES_TIMES_PROMPTS}
_IDS = listed(TOKEN, minItems=1)
_TEXTS = (TEXT, listed(TEXT, **_PROMPTS), _IDS, listed(_IDS, **_PROMPTS))
_MODEL = "The name of the served model or of a LoRA adapter; absent means the served one. Any other is 404."
_DEADLINE = Note(
    "Milliseconds in which to answer; then the status is 504. Default: the server's own limit.", between(1, MAX_DEADLINE_MS)
)

_JSON_SCHEMA: Schema = {
    "anyOf": [{"type": "object"}, TEXT | {"minLength": 1}],
    "description": "A JSON schema, or the text of one. At most 64 KiB.",
}
FORMATS: tuple[Schema, ...] = (
    {
        "type": "object",
        "properties": {"type": {"enum": ["text", "json_object"], "description": "Anything, or any JSON object."}},
        "required": ["type"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "type": {"const": "json_schema", "description": "JSON that fits a schema."},
            "json_schema": {
                "type": "object",
                "description": "The schema.",
                "properties": {
                    "schema": _JSON_SCHEMA,
                    "name": {"description": "Not used."},
                    "strict": {"description": "Not used: answers always fit."},
                    "description": {"description": "Not used."},
                },
                "required": ["schema"],
                "additionalProperties": False,
            },
        },
        "required": ["type", "json_schema"],
        "additionalProperties": False,
    },
)
_CHOICE = TEXT | {"minLength": 1, "maxLength": MAX_CHOICE_CHARACTERS}
_KINDS: dict[str, tuple[list[Schema], str]] = {
    "json": (_JSON_SCHEMA["anyOf"], "A JSON schema, or the text of one. At most 64 KiB."),
    "regex": ([TEXT | {"minLength": 1}], "A regular expression in Rust's syntax, for the whole answer. At most 64 KiB."),
    "choice": ([listed(_CHOICE, minItems=1, maxItems=MAX_GRAMMAR_CHOICES)], "The answers to choose from. At most 64 KiB."),
    "grammar": ([TEXT | {"minLength": 1}], "A grammar in Lark's form, or in GBNF. At most 64 KiB."),
    "json_object": ([{"type": "boolean"}], "Any JSON object; false is off."),
}
KINDS: Schema = {
    "type": "object",
    "properties": {
        name: {"anyOf": [*shapes, {"type": "null"}], "description": text} for name, (shapes, text) in _KINDS.items()
    },
    "additionalProperties": False,
}

NOTES: dict[str, Note] = {
    "model": Note(_MODEL),
    "prompt": Note(
        f"What to continue: a text, token ids, or a list of either, answered in turn; an empty text is the start-of-text "
        f"token. {_TOKENS} `n` times the number of prompts is at most {MAX_CHOICES_TIMES_PROMPTS}.",
        shapes=_TEXTS,
        required=True,
    ),
    "max_tokens": Note(
        "The most tokens of an answer. 0, which computes the prompt alone, needs `echo` or `prompt_logprobs`. "
        "Prompt and answer together have at most `max_model_len` tokens.",
        between(0, MAX_INT32),
        DEFAULT_MAX_TOKENS,
    ),
    "ChatRequest.max_tokens": Note(
        "The most tokens of an answer, under its older name. Absent means what the context has left.", between(1, MAX_INT32)
    ),
    "max_completion_tokens": Note(
        "The most tokens of an answer. Absent means what the context has left. Must equal `max_tokens` where both are given.",
        between(1, MAX_INT32),
    ),
    "temperature": Note(
        "Divides the scores before a token is drawn; 0 takes the likeliest, of equals the one with the lowest id.",
        between(0, 2),
        _SAMPLING.temperature,
    ),
    "top_p": Note("Draw among the likeliest that together reach this probability.", above(0, 1), _SAMPLING.top_p),
    "top_k": Note("Draw among the k likeliest tokens; 0 and -1 mean all.", between(-1, MAX_INT64), _SAMPLING.top_k),
    "min_p": Note("Draw among those at least this likely relative to the likeliest.", between(0, 1), _SAMPLING.min_p),
    "seed": Note(
        "Same seed, same request, same `system_fingerprint`: same answer. Absent lets the service choose one and report it.",
        between(SEED_LOW, SEED_HIGH),
    ),
    "n": Note(
        f"Answers to each prompt; times the number of prompts at most {MAX_CHOICES_TIMES_PROMPTS}.", between(1, MAX_CHOICES), 1
    ),
    "best_of": Note("Must equal `n`.", between(1, MAX_CHOICES)),
    "stream": Note("Send the answer in pieces, as server-sent events.", default=False),
    "stream_options": Note("What a stream carries beside the text. Only where `stream` is true."),
    "include_usage": Note("One more event at the end, with the token counts and no choices.", default=False),
    "continuous_usage_stats": Note("The token counts so far with every event.", default=False),
    "stop": Note(
        f"Texts that end an answer: one, or up to {MAX_STOP_STRINGS}, of 1 to {MAX_STOP_CHARACTERS} characters. Default: none.",
        shapes=(_STOP_TEXT, listed(_STOP_TEXT, maxItems=MAX_STOP_STRINGS)),
    ),
    "stop_token_ids": Note(
        f"Tokens that end an answer. {_TOKENS} Default: none beside the model's own.",
        shapes=(listed(TOKEN, maxItems=MAX_STOP_TOKENS),),
    ),
    "include_stop_str_in_output": Note(
        "Leave the stop string, or the stop token's text, in the answer.", default=_STOPS.include_stop
    ),
    "ignore_eos": Note("Do not end at the model's end-of-text token.", default=_STOPS.ignore_eos),
    "min_tokens": Note(
        "No stop token is drawn, and no stop string obeyed, before so many tokens; at most `max_tokens`.",
        between(0, MAX_INT32),
        _STOPS.min_tokens,
    ),
    "presence_penalty": Note(
        "Taken from the score of every token that the answer holds already.", between(-2, 2), _DECODING.presence_penalty
    ),
    "frequency_penalty": Note(
        "Taken from a token's score once for each time that the answer holds it.", between(-2, 2), _DECODING.frequency_penalty
    ),
    "repetition_penalty": Note(
        "Divides the positive, and multiplies the negative, scores of tokens of the prompt and the answer.",
        above(0, 2),
        _DECODING.repetition_penalty,
    ),
    "logit_bias": Note(
        f"Added to the scores of tokens, by token id in digits; at most {MAX_BIASES}. {_TOKENS} Default: none.",
        shapes=(
            {
                "type": "object",
                "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"},
                "additionalProperties": {"type": "number", **between(-100, 100)},
                "maxProperties": MAX_BIASES,
            },
        ),
    ),
    "bad_words": Note(
        f"Texts whose tokens never follow each other in an answer: at most {MAX_BAD_WORDS}. Default: none.",
        shapes=(listed(_STOP_TEXT, maxItems=MAX_BAD_WORDS),),
    ),
    "allowed_token_ids": Note(f"Only these tokens may be drawn. {_TOKENS} Default: all.", shapes=(_IDS,)),
    "logprobs": Note(
        "Report the log probability of each token, and so many of the likeliest in its place. Default: report none.",
        between(0, MAX_COMPLETION_LOGPROBS),
    ),
    "ChatRequest.logprobs": Note("Report the log probability of each token.", default=False),
    "top_logprobs": Note(
        "How many of the likeliest tokens to report in each place. Only where `logprobs` is true.",
        between(0, MAX_TOP_LOGPROBS),
        0,
    ),
    "prompt_logprobs": Note(
        "Report the log probability of each prompt token, and so many of the likeliest in its place. Must equal `logprobs` "
        f"where both are given with `echo`; at most {MAX_PROMPT_SCORES} in all. Default: report none.",
        between(0, MAX_LOGPROBS),
    ),
    "echo": Note("Begin each answer with its prompt.", default=False),
    "resume_token_ids": Note(
        f"Tokens of the answer that the caller has already: with the same seed the answer goes on after them. {_TOKENS} "
        "Needs a single prompt and `n` = 1. Default: none.",
        shapes=(listed(TOKEN),),
    ),
    "truncate_prompt_tokens": Note("Keep only so many tokens from the prompt's end. Default: keep all.", between(1, MAX_INT32)),
    "skip_special_tokens": Note("Leave special tokens out of the answer's text.", default=True),
    "return_token_ids": Note("Report the token ids of prompt and answer.", default=False),
    "priority": Note(
        "Higher first. A level counts as much as ten seconds of waiting, so that no call waits for ever.",
        between(0, MAX_PRIORITY),
        default=DEFAULT_PRIORITY,
    ),
    "cache_salt": Note(
        f"Callers share cached prefixes only within one salt; 1 to {MAX_SALT} characters. Default: one salt for all.",
        {"maxLength": MAX_SALT},
    ),
    "user": Note("Your name for the person who asks; not used."),
    "request_id": Note(
        "The id of this call, in the answer and in the logs. Default, also for an empty one: X-Request-Id, or a new one.",
        {"pattern": f"^({REQUEST_ID.pattern})?$"},
    ),
    "deadline_ms": Note(
        "Milliseconds in which to finish what fits; then `finish_reason` is `deadline`, or the status 504 where nothing did. "
        "Default: the server's own limit.",
        between(1, MAX_DEADLINE_MS),
    ),
    "timing": Note("Report where the time went.", default=False),
    "response_format": Note("What the answer must look like, in OpenAI's words. Default: anything.", shapes=FORMATS),
    "structured_outputs": Note(
        "What the answer must look like, in vLLM's words: one of these. Not together with `response_format` or `min_tokens`. "
        "Default: anything.",
        shapes=(KINDS,),
    ),
    **chat_fields.NOTES,
    "ChatRequest.model": Note(_MODEL, {"minLength": 1}),
    "TokenizeRequest.prompt": Note("The text.", required=True),
    "AttentionRequest.model": Note("The name of the served model; absent means it. An adapter is refused."),
    "AttentionRequest.prompt": Note(
        f"A text, or token ids, to look at; an empty text is the start-of-text token. {_TOKENS} With `answer` at most "
        f"{MOST_TOKENS} tokens.",
        shapes=(TEXT, _IDS),
        required=True,
    ),
    "answer": Note(f"What follows the prompt: a text, tokenized by itself, or token ids. {_TOKENS} Default: nothing."),
    "layers": Note(
        f"Layers whose attention is told, from 0. An answer holds at most {MOST_NUMBERS} weights and scores; a head of T "
        "tokens has T * (T + 1) / 2. Default: all.",
        shapes=(listed(TOKEN),),
    ),
    "heads": Note(
        "Query heads whose attention is told in each of these layers, from 0. Default: all.", shapes=(listed(TOKEN),)
    ),
    "scores": Note("Tell the scores before mask and softmax too.", default=False),
    "AttentionRequest.top_logprobs": Note(
        "How many of the likeliest tokens to report in each place.", between(0, MAX_LOGPROBS), DEFAULT_TOP
    ),
    "logit_lens": Note("So many guesses of each layer in each place, as if it were the last.", between(0, MOST_LENS), 0),
    "AttentionRequest.deadline_ms": _DEADLINE,
    "input": Note(
        f"What to embed: a text, token ids, or a list of either; an empty text is the start-of-text token. {_TOKENS}",
        shapes=_TEXTS,
        required=True,
    ),
    "encoding_format": Note("How the answer has a vector: as numbers, or as the bytes of float32 in base64.", default="float"),
    "dimensions": Note(
        "So many numbers of each vector, from the first on, again with length 1; at most as many as there are. Default: all.",
        {"minimum": 1},
    ),
    "EmbeddingsRequest.deadline_ms": _DEADLINE,
    "add_special_tokens": Note("With the special tokens that the checkpoint puts around a text.", default=True),
    "return_token_strs": Note("Report each token as the vocabulary spells it, too.", default=False),
    "tokens": Note(f"Token ids. {_TOKENS}", shapes=(listed(TOKEN),), required=True),
}
"""By a field's name, or by `Body.name` where a body means something else by it."""


def _off(values: tuple[Any, ...], text: str) -> Schema:
    return {"enum": [None, *values], "description": text}


REFUSED: dict[str, dict[str, Schema]] = {
    "CompletionRequest": {name: _off(values, "Not supported yet: only where it is empty.") for name, values in OFF.items()},
    "ChatRequest": {name: _off((value,), f"Not supported: {instead}.") for name, (value, instead) in NOT_BUILT.items()},
}
"""Fields that clients may send as long as they ask for nothing. They are no part of the bodies' models."""
