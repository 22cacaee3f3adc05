"""Fitting calls into limits: truncated conversations, clamped max_tokens, reasoning budgets."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from attend.model.engine.request import Request
from attend.model.errors import InvalidRequest
from attend.model.text.caller_marks import ChatText
from attend.model.text.grammar import GrammarSpec
from attend.model.text.reasoning import ReasoningLimit
from attend.model.text.tokenizer import Tokenizer
from attend.service.generation.thread_pools import run_exclusive
from attend.service.records import MAX_INPUT_TOKENS, ChatPrompt, Command


async def fit_conversation(command: Command, most: int, num_tokens: Callable[[ChatText], int]) -> Command:
    """The command with a conversation that fits in `most` tokens, where it may lose its oldest messages: as few as possible.

    `num_tokens` counts those of a prompt; it and the template run in a thread pool.
    """
    prompt = command.prompts[0]
    if not isinstance(prompt, ChatPrompt) or not prompt.most_dropped:
        return command
    room = most - max(1, min(command.stops.max_tokens or 1, most // 2))

    def fits(num_dropped: int) -> bool:
        return num_tokens(prompt.write(num_dropped)) <= room

    low, high = 0, prompt.most_dropped  # fewest and most that may have to go
    while low < high:
        middle = 0 if not low and high == prompt.most_dropped else (low + high) // 2  # mostly all of it fits
        low, high = (low, middle) if await run_exclusive(partial(fits, middle), command.arrival) else (middle + 1, high)
    if low:
        command.remarks.ignore("input")
    return replace(command, prompts=(ChatPrompt(partial(prompt.write, low)),))


def clamp(request: Request, command: Command, most: int) -> None:
    """Lower a limit beyond the context to what the prompt leaves of it, where that is asked for, and say so."""
    left = most - len(request.prompt)
    if command.remarks.clamps and 0 < left < request.max_tokens:
        request.max_tokens = left
        request.min_tokens = min(request.min_tokens, left)
        command.remarks.is_clamped = True


def reasoning_limit(command: Command, tokenizer: Tokenizer, vocab_size: int) -> ReasoningLimit | None:
    """The limit on reasoning that a call asks for, of a model that writes any."""
    chat = command.chat
    if chat is None or chat.thinking_token_budget is None or chat.form.reasoning is None:
        return None
    begin, end = chat.form.reasoning.begin, chat.form.reasoning.end
    return ReasoningLimit(tokenizer, vocab_size, begin, end, chat.form.has_channels, chat.thinking_token_budget)


def check_total(name: str, tokens: int) -> None:
    """Refuse texts that have too many tokens together."""
    if tokens > MAX_INPUT_TOKENS:
        raise InvalidRequest(f"{name} may have at most {MAX_INPUT_TOKENS} tokens in all; got {tokens}", name)


def with_place(error: InvalidRequest, kind: str, spec: GrammarSpec) -> InvalidRequest:
    """An error about a `kind` of grammar, in the caller's words."""
    name = spec.place or spec.kind
    return type(error)(name + str(error).removeprefix(kind), name)
