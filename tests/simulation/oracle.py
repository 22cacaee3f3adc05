"""What a call must come to, worked out from its command alone: no engine, no batch, no stream."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from attend.model.engine.grammars import NEXT_BEST
from attend.model.engine.request import FinishReason, TokenLogprob
from attend.model.errors import EngineFailed
from attend.model.params import SamplingParams
from attend.model.sampling_plan import SamplingPlan, completing
from attend.model.text.grammar import GrammarSpec
from attend.model.text.mask import Grammar
from attend.service.chat.grammars import answer_grammar
from attend.service.chat.parser import AnswerParser
from attend.service.chat.parts import Content, Part
from attend.service.records import ChatPrompt, Command
from tests.simulation.model import END, FORM, LETTERS, SPECIAL, VOCAB, WORDS, best_token, compiled, scored, tokenizer

SHOWN = {VOCAB - len(SPECIAL) + at: text for at, text in enumerate(SPECIAL) if text in FORM.markers}
"""Special tokens that are text in a chat."""
THINK = len(WORDS)
"""Opens reasoning, where a prompt ends with it."""


@dataclass
class Expected:
    """One answer."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    """Those that the caller sent along too."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the tokens that are drawn."""
    reason: FinishReason | None = None
    """None: it fails after its tokens, for the reason in `error`."""
    error: type[Exception] | str = ""
    stop: str | int | None = None
    hidden_end: bool = False
    """True if its last token is a stop token, which has no text."""
    text: str = ""
    """All of it, without what a stop string cuts off."""
    parts: list[Part] = field(default_factory=list)
    """Of a chat: what it shows."""


def tokens_of(command: Command, place: int) -> list[int]:
    """A prompt as tokens."""
    prompt = command.prompts[place]
    if isinstance(prompt, tuple):
        tokens = list(prompt)
    else:
        tokens = list(encoded(prompt.write().text if isinstance(prompt, ChatPrompt) else prompt)) or [END]
    return tokens[-command.truncate_prompt_tokens :] if command.truncate_prompt_tokens else tokens


def encoded(text: str) -> Iterator[int]:
    """Letters are tokens; so is the marker at the end of a chat's prompt."""
    marker = SPECIAL[0]
    for letter in text.removesuffix(marker):
        assert letter in LETTERS
        yield WORDS.index(letter.encode())
    if text.endswith(marker):
        yield THINK


def shown(text: str, stops: Sequence[str]) -> str:
    """What of a text may be shown before its end: not the beginning of a stop string."""
    sizes = (size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
    return text[: len(text) - max(sizes, default=0)]


def first_stop(text: str, before: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where a stop string begins that ends after the first `before` characters, and which."""
    found = [
        (end - len(stop), stop)
        for stop in stops
        for end in [next((at for at in range(before + 1, len(text) + 1) if text[:at].endswith(stop)), 0)]
        if end
    ]
    return min(found, default=None)


def grammar_of(command: Command, *, is_open: bool) -> GrammarSpec | None:
    """The form of the answers."""
    if command.chat is None or not command.is_formed:
        return command.grammar
    special = tokenizer().special_ids(FORM.markers)
    return answer_grammar(FORM, command.chat.calling, command.grammar, special, reasoning_open=is_open)


def drawn(
    plan: SamplingPlan, context: Sequence[int], banned: tuple[int, ...], grammar: Grammar | None, adapter: str
) -> int | None:
    """The next token: as in a step, some guesses before the mask, which may say less than it allows."""
    refused: list[int] = []
    for _ in range(0 if grammar is None else NEXT_BEST + 1):
        token = best_token(plan, context, (*banned, *refused), adapter)
        if token is None or grammar.allows(token):
            return token
        refused.append(token)
    if grammar is None:
        return best_token(plan, context, banned, adapter)
    mask = grammar.mask()
    return best_token(plan, context, {*banned, *(token for token in range(VOCAB) if not mask[token])}, adapter)


class Text:
    """The text of an answer as its tokens come, up to the first stop string that counts. Of a chat, its parts too."""

    def __init__(self, command: Command, prompt: Sequence[int]) -> None:
        self.command, self.stops = command, command.stops
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.text, self.count = "", 0
        self.parser = None if command.chat is None else parser_of(command, prompt)
        self.parts: list[Part] = []

    def push(self, token: int) -> tuple[int, str] | None:
        if self.parser is not None:
            before = self.text
            self._push(token)
            return self._read(self.parser.feed(self.text[len(before) :]))
        return self._push(token)

    def end(self, *, complete: bool) -> tuple[int, str] | None:
        """The end of all; a chat has a stop string where this shows one."""
        rest = self.utf8.decode(b"", True)
        self.text += rest
        if self.parser is None:
            return None
        return self._read([*self.parser.feed(rest), *self.parser.finish(complete=complete)])

    def _read(self, parts: list[Part]) -> tuple[int, str] | None:
        """Take parts in, up to a stop string in a row of content, of which `self.parts` keeps what is shown."""
        for part in parts:
            before = 0
            if isinstance(part, Content) and self.parts and isinstance(self.parts[-1], Content):
                before, part = len(self.parts[-1].text), Content(self.parts.pop().text + part.text)
            self.parts.append(part)
            if isinstance(part, Content) and self.count > self.stops.min_tokens:
                hit = first_stop(part.text, before, self.stops.stop)
                if hit is not None:
                    shown = self.cut(hit, part.text)
                    self.parts[-1:] = [Content(shown)] if shown else []
                    return hit
        return None

    def _push(self, token: int) -> tuple[int, str] | None:
        self.count += 1
        before = len(self.text)
        if self.command.chat is not None and token in SHOWN:
            self.text += self.utf8.decode(b"", True) + SHOWN[token]
        elif token < len(WORDS):
            self.text += self.utf8.decode(WORDS[token])
        elif not self.command.skip_special_tokens:
            self.text += self.utf8.decode(SPECIAL[token - len(WORDS)].encode())
        return first_stop(self.text, before, self.stops.stop) if self.count > self.stops.min_tokens else None

    def cut(self, hit: tuple[int, str], text: str) -> str:
        at, stop = hit
        return text[: at + len(stop) if self.stops.include_stop_str_in_output else at]


def expected(
    command: Command, index: int, seed: int, context: int, broken_at: int | None = None, adapter: str = ""
) -> Expected:
    """Answer `index` of a call with this seed, under a model of `context` tokens. `broken_at`: at this position it fails."""
    prompt = tokens_of(command, index // command.n)
    answer, stops = Expected(prompt), command.stops
    ends = {*stops.stop_token_ids, *(() if stops.ignore_eos and not command.is_formed else (END,))}
    spec = grammar_of(command, is_open=prompt[-1] == THINK)
    grammar = None if spec is None else compiled(spec).start()
    most = max(1, context - len(prompt)) if stops.max_tokens is None else stops.max_tokens
    plan = SamplingPlan(SamplingParams(temperature=0), seed, index, command.decoding)
    words = [list(encoded(word)) for word in command.decoding.bad_words for word in (word, " " + word)]
    text, output = Text(command, prompt), answer.tokens
    of_content = {token for token in stops.stop_token_ids if token < len(WORDS)} if text.parser is not None else set()
    ends -= of_content
    for token in command.resume_token_ids:
        output.append(token)
        try:
            fits = grammar is None or grammar.advance(token) is None
        except EngineFailed:
            fits = False
        stops_content = token in of_content and text.parser.in_content and len(output) > stops.min_tokens
        if text.push(token) or token in ends or stops_content or not fits or len(output) >= most:
            answer.error = "invalid"
            return answer
    while len(output) < most:
        before = [*prompt, *output]
        if broken_at is not None and len(before) >= broken_at:
            answer.error = "poison"
            return answer
        banned = tuple(ends) if len(output) < stops.min_tokens else ()
        token = drawn(plan, before, banned + completing(words, output), grammar, adapter)
        if token is None:
            answer.error = "invalid"
            return answer
        output.append(token)
        if command.logprobs is not None:
            answer.logprobs.append(scored(token, before[-1], command.logprobs))
        stopped = token in ends and len(output) > stops.min_tokens
        if grammar is not None and not stopped:
            grammar.advance(token)
        stopped = stopped or (token in of_content and text.parser.in_content and len(output) > stops.min_tokens)
        answer.hidden_end = stopped and not stops.include_stop_str_in_output
        hit = None if answer.hidden_end else text.push(token)
        if hit is not None:
            answer.reason, answer.stop, answer.text, answer.hidden_end = (
                FinishReason.STOP,
                hit[1],
                text.cut(hit, text.text),
                False,
            )
            answer.parts = text.parts
            return answer
        if stopped or (grammar is not None and grammar.is_finished):
            answer.reason, answer.stop = FinishReason.STOP, token if stopped and token != END else None
            break
    answer.reason = answer.reason or FinishReason.LENGTH
    hit = text.end(complete=answer.reason is FinishReason.STOP)
    if hit is not None:
        answer.reason, answer.stop = FinishReason.STOP, hit[1]
    answer.text, answer.parts = text.text, text.parts
    return answer


def parser_of(command: Command, prompt: Sequence[int]) -> AnswerParser:
    """What reads a chat's answer."""
    assert command.chat is not None
    return AnswerParser(
        FORM,
        command.chat.calling.tools,
        reasoning_open=prompt[-1] == THINK,
        content_formed=command.grammar is not None,
    )
