"""Attention weights, log probabilities and logit lens: POST /v1/attention and gRPC Explain.

The work is done beside the engine, one text at a time, on a thread that the operating system runs only when a core is free
(SCHED_IDLE). It is refused while requests wait for the engine.
"""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from attend.model.errors import Busy, ContextTooLong, DeadlineExceeded, InvalidRequest, NotSupported, Unavailable
from attend.model.params import describe
from attend.service.generation.generation import GenerationService, admission
from attend.service.generation.prepare import SLACK
from attend.service.generation.thread_pools import FairSemaphore, TurnPool, run_in_pool, stand_back
from attend.service.observe.metrics import RequestRecord
from attend.service.records import MAX_NUMBERS, MAX_TOKENS, ExplainCommand

if TYPE_CHECKING:  # it imports torch, which no test of the wire needs
    from attend.model.explain.explainer import Explainer, Explanation

MAX_CALLS = 8
"""Texts that are explained or wait for it."""
_beside = TurnPool(1, "attend-explain", stand_back)


@dataclass(frozen=True, slots=True)
class ExplainResult:
    """A text's tokens, and what the model does with them."""

    command: ExplainCommand
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    heads: tuple[int, ...]
    """Query heads that are in the answer, of each layer."""
    explanation: "Explanation"


class ExplainService:
    """Explanations by the model that a service serves."""

    def __init__(self, service: GenerationService, explainer: "Explainer") -> None:
        self.service = service
        self.explainer = explainer
        self._places = FairSemaphore(MAX_CALLS, "texts are being explained")

    async def explain(self, command: ExplainCommand, record: RequestRecord, resources: ExitStack) -> ExplainResult:
        """The answer to one call, which is charged for the tokens of its text. Raises an AttendError.

        It has a place among MAX_CALLS until `resources` is closed: an answer that is being written takes some MB.
        """
        deadline, caller = self.service.deadline_of(command.arrival, command.deadline_ms), command.caller
        with record.errors(), ExitStack() as stack:
            lease = stack.enter_context(admission(caller))
            resources.enter_context(self._places.hold(caller.owner))
            self._check_model(command.model)
            self._check_room()
            try:
                async with asyncio.timeout_at(deadline):
                    size = len(command.prompt) + len(command.answer)
                    prompt, answer = await run_in_pool(partial(self._tokens, command), size, owner=command.arrival.turn)
                    tokens = (*prompt, *answer)
                    layers, heads = self._chosen(command, len(tokens))
                    if lease is not None:
                        lease.reserve(len(tokens))
                        lease.use(len(tokens))
                    explanation = await self._compute(command, tokens, layers, heads)
            except TimeoutError as error:
                raise DeadlineExceeded("the deadline passed before the text was explained") from error
            record.count_computed(len(tokens))
            return ExplainResult(command, tokens, len(prompt), heads, explanation)

    def _check_model(self, name: str) -> None:
        self.service.preparation.check_text()
        if name and self.service.find(name) is not None:
            raise NotSupported(
                f"model: /v1/attention explains {self.service.model_name!r} alone; {name[:128]!r} is an adapter", "model"
            )

    def _check_room(self) -> None:
        """Refuse while requests wait: this work would use their core."""
        engine = self.service.engine
        if engine.draining:
            raise Unavailable("the server is shutting down; try another replica")
        stats, most = engine.stats(), engine.info.max_batch_requests
        if stats.num_waiting or stats.num_running >= most:
            raise Busy(f"the engine is busy: {stats.num_running} requests are running, {stats.num_waiting} are waiting")

    def _tokens(self, command: ExplainCommand) -> tuple[list[int], list[int]]:
        """The tokens of the prompt and of the answer. May run in any thread."""
        most = min(MAX_TOKENS, self.service.engine.info.max_model_len)
        both = (command.prompt, command.answer)
        ids, characters = (sum(len(text) for text in both if isinstance(text, kind)) for kind in (tuple, str))
        if ids > most:
            raise _too_long(most, f"{ids}")
        if characters > SLACK * most * self.service.tokenizer.longest:
            raise _too_long(most, f"more, with {characters} characters")
        prepare = self.service.preparation.tokens
        prompt, answer = prepare(command.prompt), []
        if command.answer:
            answer = prepare(command.answer, "answer", add_special_tokens=False)
        if len(prompt) + len(answer) > most:
            raise _too_long(most, f"{len(prompt) + len(answer)}")
        return prompt, answer

    def _chosen(self, command: ExplainCommand, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Layers and heads. Raises InvalidRequest where the answer would be too long."""
        layers = _numbers("layers", command.layers, self.explainer.num_layers)
        heads = _numbers("heads", command.heads, self.explainer.num_heads)
        each = length * (length + 1) // 2 * (2 if command.scores else 1)
        total = each * len(layers) * len(heads)
        if total > MAX_NUMBERS:
            what = f"{len(layers)} layers x {len(heads)} heads x {each} numbers of a head are {total}"
            raise InvalidRequest(
                f"layers, heads: choose fewer; an answer holds at most {MAX_NUMBERS} numbers, and {what}", "layers"
            )
        return layers, heads

    async def _compute(
        self, command: ExplainCommand, tokens: tuple[int, ...], layers: tuple[int, ...], heads: tuple[int, ...]
    ) -> "Explanation":
        """Computed beside the event loop; stops at its next slice when the caller disconnects or the deadline passes."""
        from attend.model.explain.explainer import Question

        question = Question(tokens, layers, heads, command.scores, command.top_logprobs, command.logit_lens)
        left, began = threading.Event(), float("inf")

        def between() -> None:
            """Rest between slices of work, as long as one took of a core: beside streams that leaves them the caches."""
            nonlocal began
            if left.is_set():
                raise _LeftError
            if self.service.engine.stats().num_running:
                time.sleep(max(0.0, time.thread_time() - began))
            began = time.thread_time()

        try:
            work = partial(self.explainer.explain, question, between)
            return await asyncio.wrap_future(_beside.submit(command.caller.turn, work))
        finally:
            left.set()


class _LeftError(Exception):
    """The caller disconnected, or the deadline passed."""


def _too_long(most: int, length: str) -> ContextTooLong:
    return ContextTooLong(f"prompt: /v1/attention takes at most {most} tokens; prompt and answer have {length}", "prompt")


def _numbers(name: str, asked: tuple[int, ...] | None, count: int) -> tuple[int, ...]:
    """Layers or heads, each from 0 to `count` - 1 and none twice."""
    if asked is None:
        return tuple(range(count))
    if len(asked) > count:
        raise InvalidRequest(f"{name} may hold at most {count} numbers; got {len(asked)}", name)
    for number in asked:
        if not 0 <= number < count:
            raise InvalidRequest(f"{name} must hold integers from 0 to {count - 1}; got {describe(number)}", name)
    if len({*asked}) < len(asked):
        raise InvalidRequest(f"{name} must hold no number twice", name)
    return asked


def rows(matrix: Any) -> Iterator[Any]:
    """The rows of a square matrix, up to the diagonal, each an array of float32."""
    return (row[: at + 1].numpy() for at, row in enumerate(matrix))


def top_pairs(tokens: Any, logprobs: Any, count: int) -> Sequence[tuple[int, float]]:
    """The first `count` of a row of tokens with their log probabilities."""
    return list(zip(tokens[:count].tolist(), logprobs[:count].tolist(), strict=True))


def explainable(explaining: ExplainService | None) -> ExplainService:
    """What explains the model's texts. Raises NotSupported where nothing does: no process has the whole model."""
    if explaining is None:
        raise NotSupported("tensor_parallel is set, and a text is explained by a process that has the whole model")
    return explaining
