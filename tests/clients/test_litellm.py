"""LiteLLM, by both of its ways to an OpenAI-compatible server: answers, pieces, and its own errors."""

import asyncio

import pytest

from tests.clients.narrow import MODEL
from tests.service.server import Server

litellm = pytest.importorskip("litellm")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

PROMPT = "def fibonacci(n):"
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def text(server: Server):
    """The fields of a greedy text completion."""
    where = {"model": f"text-completion-openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none"}
    return {**where, "prompt": PROMPT, "temperature": 0, "max_tokens": 24, "max_retries": 0}


@pytest.fixture
def chat(server: Server):
    """The fields of a greedy chat completion."""
    where = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none"}
    return {**where, "messages": MESSAGES, "temperature": 0, "max_tokens": 24, "max_retries": 0}


def test_text_is_the_same_whole_streamed_and_asynchronous(text):
    async def streamed() -> str:
        pieces = await litellm.atext_completion(**text, stream=True)
        return "".join([piece.choices[0].text or "" async for piece in pieces])

    whole = litellm.text_completion(**text)
    assert whole.choices[0].text == "".join(
        piece.choices[0].text or "" for piece in litellm.text_completion(**text, stream=True)
    )
    assert whole.choices[0].text == asyncio.run(litellm.atext_completion(**text)).choices[0].text
    assert whole.choices[0].text == asyncio.run(streamed())
    assert whole.usage.completion_tokens == 24


def test_a_message_is_the_same_whole_streamed_and_asynchronous(chat):
    async def streamed() -> str:
        pieces = await litellm.acompletion(**chat, stream=True)
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

    whole = litellm.completion(**chat)
    content = whole.choices[0].message.content
    assert content == "".join(piece.choices[0].delta.content or "" for piece in litellm.completion(**chat, stream=True))
    assert content == asyncio.run(litellm.acompletion(**chat)).choices[0].message.content
    assert content == asyncio.run(streamed())
    assert whole.usage.completion_tokens == 24


def test_a_streams_pieces_build_the_whole_answer_with_the_servers_counts(chat):
    whole = litellm.completion(**chat)
    pieces = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(pieces, messages=MESSAGES)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(built.usage, name) for name in counts] == [getattr(whole.usage, name) for name in counts]


def test_fields_that_are_not_openais_reach_the_server(text):
    greedy = litellm.text_completion(**text).choices[0].text
    assert litellm.text_completion(**{**text, "temperature": 1}, top_k=1).choices[0].text == greedy
    bound = litellm.text_completion(**text, extra_body={"structured_outputs": {"regex": "[0-9]{6}"}}).choices[0].text
    assert len(bound) == 6
    assert bound.isdigit()


def test_prompts_of_one_call_and_their_log_probabilities_keep_their_places(text):
    prompts = [PROMPT, "class Stack:\n"]
    answer = litellm.text_completion(**{**text, "prompt": prompts, "max_tokens": 4}, logprobs=2, echo=True)
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        assert choice.text.startswith(prompt)
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs[0] is None


def longer(ask: dict) -> dict:
    """`ask` with a prompt that is longer than the context."""
    return ask | ({"prompt": "x " * 2000} if "prompt" in ask else {"messages": [{"role": "user", "content": "x " * 2000}]})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "kind", "word"),
    [
        (lambda ask: ask | {"max_tokens": -1}, "BadRequestError", "max_tokens must be"),
        (lambda ask: ask | {"top_p": 2}, "BadRequestError", "top_p must be"),
        (longer, "ContextWindowExceededError", "maximum context length is 1024"),
        (lambda ask: ask | {"model": ask["model"].replace(MODEL, "nobody")}, "NotFoundError", "nobody"),
    ],
    ids=["max_tokens", "top_p", "long", "model"],
)
def test_an_error_is_litellms_own_exception(text, chat, change, kind, word, stream):
    for create, ask in ((litellm.text_completion, text), (litellm.completion, chat)):
        with pytest.raises(getattr(litellm, kind), match=word):
            list(create(**change(ask), stream=stream))


def test_a_full_server_and_a_wrong_key_are_litellms_own_exceptions(narrow, chat):
    ask = {**chat, "api_base": f"{narrow.server.url}/v1", "api_key": narrow.key}
    with narrow.full(), pytest.raises(litellm.RateLimitError, match="queue"):
        litellm.completion(**ask)
    with pytest.raises(litellm.AuthenticationError, match="API key"):
        litellm.completion(**{**ask, "api_key": "sk-wrong"})
