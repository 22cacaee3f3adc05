"""Rows whose values are wrong: ranges, combinations, tokens, limits and models."""

from attend.v1 import generation_pb2 as pb
from tests.service.bad_calls import DETOKENIZE, TOKENIZE
from tests.service.bad_rows import CONTEXT, both, chat, completion, grpc, http

RANGES = [
    both("ranges: max_tokens below 0", {"max_tokens": -7}, {"max_tokens": -7}, "max_tokens", "from 0 to 2147483647"),
    both("ranges: nothing to make", {"max_tokens": 0}, {"max_tokens": 0}, "max_tokens", "at least 1"),
    both("ranges: temperature above 2", {"temperature": 2.01}, {"temperature": 2.01}, "temperature", "from 0 to 2"),
    grpc("ranges: top_p of 0", pb.GenerateRequest(text="a", sampling={"top_p": 0}).SerializeToString(), "top_p"),
    both("ranges: top_p below 0", {"top_p": -1e-9}, {"sampling": {"top_p": -1e-9}}, "top_p", "from 0 to 1"),
    both("ranges: min_p above 1", {"min_p": 2}, {"sampling": {"min_p": 2}}, "min_p", "from 0 to 1"),
    both("ranges: top_k of -2", {"top_k": -2}, {"sampling": {"top_k": -2}}, "top_k", "from -1"),
    both("ranges: no answers", {"n": 0}, {"sampling": {"n": 0}}, "n", "from 1 to 8"),
    both(
        "ranges: presence_penalty",
        {"presence_penalty": -2.1},
        {"decoding": {"presence_penalty": -2.1}},
        "presence_penalty",
        "-2 to 2",
    ),
    both(
        "ranges: repetition_penalty",
        {"repetition_penalty": 0},
        {"decoding": {"repetition_penalty": 0}},
        "repetition_penalty",
        "above 0",
    ),
    both(
        "ranges: a bias of 101",
        {"logit_bias": {"3": 101}},
        {"decoding": {"logit_bias": {3: 101}}},
        "logit_bias[3]",
        "-100 to 100",
    ),
    both("ranges: deadline_ms of 0", {"deadline_ms": 0}, {"deadline_ms": 0}, "deadline_ms", "from 1"),
    both("ranges: a priority of 10", {"priority": 10}, {"priority": 10}, "priority", "from 0 to 9"),
    both(
        "ranges: truncate_prompt_tokens below 0",
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": -1},
        "truncate_prompt_tokens",
        "from 1",
    ),
    both(
        "ranges: prompt_logprobs of 21",
        {"prompt_logprobs": 21},
        {"response": {"prompt_logprobs": 21}},
        "prompt_logprobs",
        "0 to 20",
    ),
    completion("ranges: logprobs of 6", {"logprobs": 6}, "logprobs", "from 0 to 5"),
    completion("ranges: a seed of 2^63", {"seed": 2**63}, "seed", "from -9223372036854775808"),
    chat("ranges: top_logprobs of 21", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    http("ranges: NaN", b'{"prompt": "a", "top_p": NaN}', None, "NaN"),
    http("ranges: a float beyond floats", b'{"prompt": "a", "temperature": 1e309}', None, "out of range"),
]
COMBINATIONS = [
    completion("combinations: best_of is not n", {"n": 2, "best_of": 3}, "best_of", "equal n"),
    completion("combinations: options of a stream without one", {"stream_options": {}}, "stream_options", "stream is true"),
    completion(
        "combinations: two structures",
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "both",
    ),
    both(
        "combinations: min_tokens over max_tokens",
        {"min_tokens": 5, "max_tokens": 4},
        {"max_tokens": 4, "stopping": {"min_tokens": 5}},
        "min_tokens",
        "from 0 to 4",
    ),
    both(
        "combinations: a structure and min_tokens",
        {"min_tokens": 1, "structured_outputs": {"regex": "a"}},
        {"stopping": {"min_tokens": 1}, "decoding": {"regex": "a"}},
        "min_tokens",
        "structured output",
    ),
    both(
        "combinations: two answers to resume",
        {"n": 2, "resume_token_ids": [3]},
        {"sampling": {"n": 2}, "resume_token_ids": {"ids": [3]}},
        "resume_token_ids",
        "n = 1",
    ),
    chat("combinations: two different limits", {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "equal"),
    chat("combinations: top_logprobs without logprobs", {"top_logprobs": 1}, "top_logprobs", "logprobs is true"),
]
TOKENS = [
    both("tokens: below 0", {"prompt": [-1]}, {"token_ids": {"ids": [-1]}}, "prompt", "from 0 to"),
    both("tokens: 2^31", {"prompt": [3, 2**31]}, {"token_ids": {"ids": [3, 2**31]}}, "prompt", "from 0 to"),
    both(
        "tokens: an unknown stop token",
        {"stop_token_ids": [10**9]},
        {"stopping": {"stop_token_ids": [10**9]}},
        "stop_token_ids",
        "from 0 to",
    ),
    both(
        "tokens: an unknown bias",
        {"logit_bias": {"1000000000": 1}},
        {"decoding": {"logit_bias": {10**9: 1}}},
        "logit_bias",
        "from 0 to",
    ),
    both(
        "tokens: an unknown one allowed",
        {"allowed_token_ids": [3, -3]},
        {"decoding": {"allowed_token_ids": [3, -3]}},
        "allowed_token_ids",
        "from 0 to",
    ),
    both(
        "tokens: an unknown one to resume",
        {"resume_token_ids": [10**9]},
        {"resume_token_ids": {"ids": [10**9]}},
        "resume_token_ids",
        "from 0 to",
    ),
    completion("tokens: none allowed", {"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
    completion("tokens: a list of an empty list", {"prompt": [[]]}, "prompt", "empty list"),
    completion("tokens: a bias for a word", {"logit_bias": {"the": 1}}, "logit_bias", "token ids as keys"),
    http("tokens: unknown to the detokenizer", {"tokens": [5, 10**30]}, "tokens", "from 0 to", path=DETOKENIZE),
    grpc("tokens: an empty list over gRPC", pb.GenerateRequest(token_ids={}).SerializeToString(), "empty list"),
]
LIMITS = [
    both(
        "limits: a long prompt",
        {"prompt": [3] * 5000},
        {"token_ids": {"ids": [3] * 5000}},
        "prompt",
        "maximum context length",
        CONTEXT,
    ),
    both(
        "limits: a long answer", {"max_tokens": 10**6}, {"max_tokens": 10**6}, "max_tokens", "maximum context length", CONTEXT
    ),
    both("limits: five stops", {"stop": [*"abcde"]}, {"stopping": {"stop_strings": [*"abcde"]}}, "stop", "at most 4"),
    both("limits: a long stop", {"stop": "z" * 257}, {"stopping": {"stop_strings": ["z" * 257]}}, "stop", "256"),
    both("limits: an empty stop", {"stop": [""]}, {"stopping": {"stop_strings": [""]}}, "stop", "at least 1"),
    both(
        "limits: 301 stop tokens",
        {"stop_token_ids": [3] * 301},
        {"stopping": {"stop_token_ids": [3] * 301}},
        "stop_token_ids",
        "300",
    ),
    both(
        "limits: 301 biases",
        {"logit_bias": {str(i): 1 for i in range(301)}},
        {"decoding": {"logit_bias": dict.fromkeys(range(301), 1)}},
        "logit_bias",
        "300",
    ),
    both("limits: 65 bad words", {"bad_words": ["x"] * 65}, {"decoding": {"bad_words": ["x"] * 65}}, "bad_words", "64"),
    both("limits: a long id", {"request_id": "i" * 129}, {"request_id": "i" * 129}, "request_id", "1 to 128"),
    both("limits: a line end in an id", {"request_id": "a\r\nb"}, {"request_id": "a\r\nb"}, "request_id", "letters, digits"),
    completion("limits: a long user", {"user": "u" * 257}, "user", "a string of at most 256 characters"),
    completion("limits: 129 answers in all", {"prompt": ["a"] * 43, "n": 3}, "n", "128"),
    http("limits: a body over a mebibyte", b'{"prompt": "' + b"a" * 2**20 + b'"}', None, "1048576", "request_too_large"),
    both(
        "models: another", {"model": "no-such-model"}, {"model": "no-such-model"}, "model", "no-such-model", "model_not_found"
    ),
    both(
        "models: a log line",
        {"model": 'x"} \n{"level": "info'},
        {"model": 'x"} \n{"level": "info'},
        "model",
        "does not exist",
        "model_not_found",
    ),
    http(
        "models: another tokenizer",
        {"prompt": "a", "model": "other"},
        "model",
        "does not exist",
        "model_not_found",
        path=TOKENIZE,
    ),
]
