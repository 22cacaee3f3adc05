"""Preparation of a call: tokenize, compile grammars, check against the model, make engine requests."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from attend.model.engine.request import EngineInfo, Request, check_fits
from attend.model.errors import ContextTooLong, EngineFailed, InvalidRequest, NotSupported
from attend.model.params import MAX_PROMPT_SCORES, at_most, token_ids
from attend.model.text.caller_marks import ChatText, Span
from attend.model.text.grammar import GrammarCompiler, GrammarSpec
from attend.model.text.mask import CompiledGrammar, Grammar
from attend.model.text.reasoning import ReasoningBudget
from attend.model.text.schema import Whitespace
from attend.model.text.tokenizer import Tokenizer
from attend.service.chat.forms import is_reasoning_open
from attend.service.chat.grammars import answer_grammar
from attend.service.generation.answer import Answer, parser_of
from attend.service.generation.fitting import check_total, clamp, fit_conversation, reasoning_limit, with_place
from attend.service.generation.infill import infill
from attend.service.generation.text import TextStream
from attend.service.generation.thread_pools import TurnPool, run_exclusive, run_in_pool
from attend.service.records import Arrival, ChatPrompt, Command, FramedText, Prompt

T = TypeVar("T")

INLINE_CHARACTERS = 1024
"""Work that takes longer than tokenizing so many characters, a millisecond at most, runs in a thread, so that the event loop
continues to serve streams. Other work is counted in characters too, by the time it takes."""
IDS_A_CHARACTER = 8
"""Token ids that are checked in the time of a character."""
CHARACTERS_AN_ANSWER = 32
"""Making a request and its answer."""
CHARACTERS_A_RESUMED_TOKEN = 8
"""Its text, and its way through a grammar."""
COMPILES = 8
"""Compiling a grammar takes so many times longer than tokenizing a text of its length: a tenth of a second and more."""
_compiling = TurnPool(2, "attend-grammar")
"""Threads of their own: each waits for a child process, and short texts would wait with them."""
SLACK = 4
"""A prompt with this many times more characters than its context could hold is refused before any work is done."""
SEED_BITS = 48  # server-chosen seeds survive a JSON reader that keeps numbers as doubles


@dataclass(slots=True)
class TokenizedPrompts:
    """The texts of a command as tokens."""

    prompts: list[list[int]]
    echoes: list[str]
    """What each answer begins with, by prompt; empty without echo."""
    bad_words: list[list[int]]
    is_reasoning_open: bool | None = None  # of a chat, see `forms.is_reasoning_open`
    may_reason: bool = True


class Preparation:
    """Knows the model's vocabulary and limits, and its tokenizer."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer,
        json_whitespace: Whitespace = "compact",
        suppress_tokens: tuple[int, ...] = (),
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.grammars = GrammarCompiler(tokenizer, info.vocab_size, info.eos_token_ids, whitespace=json_whitespace)
        self._banned_tokens = tuple(token for token in suppress_tokens if token < info.vocab_size)
        self._most_characters = SLACK * info.max_model_len * tokenizer.longest

    async def answers(self, command: Command) -> dict[str, Answer]:
        """The answers to make, by the ids of their engine requests. Raises InvalidRequest with the field named.

        Work that may take longer than a millisecond runs in a thread pool.
        """
        if command.embedding is None and not command.scored_token_ids:
            self.check_text()
        command = await fit_conversation(command, self.info.max_model_len, self._num_tokens)
        prompts = [await self._prompt_text(prompt, command, place) for place, prompt in enumerate(command.prompts)]
        read = await _run(partial(self._read, command, prompts), _reading(command, prompts), command.arrival.turn)
        spec, grammar = await self._grammar(command, read)
        if spec is not None and spec.kind != "tools":
            read.is_reasoning_open = read.may_reason = False  # the form begins with the answer, and all of it is content
        return await _run(partial(self._make_answers, command, read, grammar), _making(command), command.arrival.turn)

    def _num_tokens(self, written: ChatText) -> int:
        """How many tokens a chat's prompt has; of one that cannot fit, more than fit."""
        is_short = len(written.text) <= self._most_characters
        return len(self._tokens(_of_chat(written), "messages")) if is_short else self.info.max_model_len + 1

    async def tokens_of(self, prompt: Prompt, arrival: Arrival) -> list[int]:
        """The tokens of a prompt, made in a thread pool. Raises InvalidRequest."""
        if isinstance(prompt, tuple):
            return self.tokens(prompt)
        if isinstance(prompt, str):
            text = FramedText(prompt)
        else:
            assert isinstance(prompt, ChatPrompt)
            text = _of_chat(await run_exclusive(prompt.write, arrival))
        return await run_in_pool(partial(self._tokens, text, "prompt"), len(text.text), owner=arrival.turn)

    def check_text(self) -> None:
        """Raise NotSupported where the model makes embeddings alone."""
        if not self.info.makes_text:
            raise NotSupported(
                "this model generates no text: its checkpoint has no head for it; POST /v1/embeddings or /v1/rerank is served",
                "model",
            )

    async def _grammar(self, command: Command, read: TokenizedPrompts) -> tuple[GrammarSpec | None, CompiledGrammar | None]:
        """The grammar of the answers. A fault of the one that was asked for is told as where it stands alone."""
        turn, content = command.arrival.turn, command.grammar
        try:
            spec = await self._grammar_spec(command, read)
            return spec, None if spec is None else await self.compile_grammar(spec, turn)
        except InvalidRequest as error:
            if content is not None and command.chat is not None and error.field in ("tools", content.kind):
                await self.compile_grammar(content, turn)
                if not command.chat.calling.tools:
                    raise with_place(error, "tools", content) from error
            raise

    async def _grammar_spec(self, command: Command, read: TokenizedPrompts) -> GrammarSpec | None:
        """The one asked for, or one with calls and reasoning in it."""
        chat, content = command.chat, command.grammar
        if chat is None or not command.is_formed:
            return content
        form = replace(chat.form, reasoning=None) if read.is_reasoning_open is False else chat.form
        special, is_open = self.tokenizer.special_ids(chat.form.markers), bool(read.is_reasoning_open)
        write = partial(answer_grammar, form, chat.calling, content, special, reasoning_open=is_open)
        return await run_exclusive(write, command.arrival)

    async def compile_grammar(self, spec: GrammarSpec, turn: str | None = None) -> CompiledGrammar:
        """A grammar, compiled in a thread pool. Raises InvalidRequest that says where it is wrong."""
        try:
            return await run_in_pool(partial(self.grammars.compile, spec), COMPILES * len(spec.text), _compiling, turn)
        except InvalidRequest as error:
            raise with_place(error, spec.kind, spec) from error

    async def _prompt_text(self, prompt: Prompt, command: Command, place: int) -> FramedText | tuple[int, ...]:
        """A prompt as text or tokens. One that cannot fit is refused before any work is done."""
        limit, name = self.info.max_model_len, command.name_of(place)
        if isinstance(prompt, tuple):
            if len(prompt) > limit and command.truncate_prompt_tokens is None:
                size = f"{limit} tokens, which a prompt of {len(prompt)} exceeds"
                raise ContextTooLong(f"{name}: this model's maximum context length is {size}", command.field_of(place))
            return prompt
        if isinstance(prompt, ChatPrompt):  # its template writes the special tokens
            text = _of_chat(await run_exclusive(prompt.write, command.arrival))
        elif isinstance(prompt, FramedText):
            text = self._short(prompt)
        else:
            text = FramedText(infill(self.tokenizer, prompt, command.suffix) if command.suffix else prompt)
        if text.num_characters > self._most_characters:
            size = f"{limit} tokens, which {text.num_characters} characters cannot fit"
            size = f"{name}: this model's maximum context length is {size}"
            least = text.num_characters // self.tokenizer.longest
            raise ContextTooLong(size, command.field_of(place), prompt_tokens=least, limit=limit)
        return text

    def _read(self, command: Command, prompts: list[FramedText | tuple[int, ...]]) -> TokenizedPrompts:
        """Tokenize and check all texts and token ids of a command. May run in any thread."""
        self._check_ids(command)
        whole = [self._tokens(prompt, command.name_of(place)) for place, prompt in enumerate(prompts)]
        kept = [self._truncate(tokens, command) for tokens in whole]
        if command.in_parts:
            self._check_lengths(command, kept)
        if command.prompt_logprobs is not None:
            self._check_scores(command.prompt_logprobs + 1, command.n * sum(map(len, kept)))
        echoes = [self._echo(*each) for each in zip(prompts, whole, kept, strict=True)] if command.echo else []
        is_open = None
        if command.chat is not None and isinstance(prompts[0], FramedText):
            is_open = is_reasoning_open(command.chat.form, prompts[0].text)
        return TokenizedPrompts(kept, echoes, self._bad_words(command.decoding.bad_words), is_open)

    def _make_answers(self, command: Command, read: TokenizedPrompts, grammar: CompiledGrammar | None) -> dict[str, Answer]:
        """The answers, and their engine requests. May run in any thread."""
        given = command.sampling.seed
        seed = secrets.randbits(SEED_BITS) if given is None else given
        unique = secrets.token_hex(8)  # callers choose their own ids, and may choose one twice
        ends, shown, is_open = self._ends(command), self._marker_tokens(command), bool(read.is_reasoning_open)
        controls = self._control_tokens(command, ends)
        limit = reasoning_limit(command, self.tokenizer, self.info.vocab_size) if read.may_reason else None
        priority, salt = command.caller.priority(command.priority), command.caller.salt(command.cache_salt)
        answers = {}
        for index in range(command.num_answers):
            place = index // command.n
            request = self._request(f"{unique}-{index}", read.prompts[place], command, seed, index)
            request.priority, request.cache_salt = priority, salt
            request.stop_token_ids, request.bad_words = ends, read.bad_words
            clamp(request, command, self.info.max_model_len)
            check_fits(request, self.info.max_model_len, command.name_of(place))
            request.grammar = None if grammar is None else _start_grammar(grammar, command.resume_token_ids)
            if limit is not None:
                request.grammar = ReasoningBudget(limit, request.grammar, is_open=is_open)
            skip = command.skip_special_tokens
            text = TextStream(self.tokenizer, command.stops, skip_special_tokens=skip, visible_tokens=shown)
            echo = read.echoes[place] if command.echo else ""
            answer = Answer(index, request, command.stops, text, self.info.eos_token_ids, echo)
            if command.chat is not None:
                answer.parser = parser_of(command.chat, is_open, content_formed=command.grammar is not None)
                answer.max_calls = None if command.chat.calling.parallel else 1
            if answer.parser is not None:
                answer.content_stop_ids = ends - controls
                request.stop_token_ids = ends & controls
            answer.resume()
            answers[request.request_id] = answer
        return answers

    def _check_ids(self, command: Command) -> None:
        size, decoding = self.info.vocab_size, command.decoding
        at_most("allowed_token_ids", decoding.allowed_token_ids, size, "token ids, as many as the vocabulary has")
        at_most("resume_token_ids", command.resume_token_ids, self.info.max_model_len, "token ids, as many as the context")
        token_ids("stop_token_ids", command.stops.stop_token_ids, size)
        token_ids("allowed_token_ids", decoding.allowed_token_ids, size)
        token_ids("logit_bias", tuple(decoding.logit_bias), size)
        token_ids("resume_token_ids", command.resume_token_ids, size)

    def _check_scores(self, each: int, tokens: int) -> None:
        """Refuse a call whose answer would be nothing but scores, and hundreds of MB of them."""
        if each * tokens > MAX_PROMPT_SCORES:
            wanted = f"prompt_logprobs may ask for at most {MAX_PROMPT_SCORES} log probabilities of prompt tokens in all"
            raise InvalidRequest(f"{wanted}; got {each} for each of {tokens} tokens", "prompt_logprobs")

    def _check_lengths(self, command: Command, texts: list[list[int]]) -> None:
        """Refuse texts where the model makes no vectors, or not of one so long, or not of so many tokens."""
        rules, most = command.embedding, self.info.max_model_len - (command.stops.max_tokens or 0)
        does = "reads" if rules is None else "embeds"
        if rules is not None:
            rules.require_pooling()
            most = min(most, rules.max_tokens or most)
        place = max(range(len(texts)), key=lambda at: len(texts[at]))
        if len(texts[place]) > most:
            limit = f"this model {does} texts of at most {most} tokens; got {len(texts[place])}"
            raise ContextTooLong(f"{command.name_of(place)}: {limit}", command.field_of(place))
        check_total(command.field, sum(map(len, texts)))

    def tokens(
        self,
        prompt: str | Sequence[int],
        name: str = "prompt",
        *,
        add_special_tokens: bool = True,
        literals: tuple[Span, ...] = (),
    ) -> list[int]:
        """A text, or ids, as tokens of the model; an empty text is the start-of-text token. May run in any thread.

        Raises InvalidRequest about the field `name`.
        """
        if not isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest(f"{name} must hold at least one token id; got an empty list", name)
            return list(token_ids(name, prompt, self.info.vocab_size))
        tokens = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens, literals=literals)
        if tokens and max(tokens) >= self.info.vocab_size:  # a tokenizer may know more than the model does
            field = name.partition("[")[0]
            raise InvalidRequest(f"{name} has the token {max(tokens)}, which this model does not know", field)
        return tokens or self._start_of_text(name)

    def _tokens(self, prompt: FramedText | tuple[int, ...], name: str) -> list[int]:
        if isinstance(prompt, tuple):
            return self.tokens(prompt, name)
        (before, after), most = prompt.around, prompt.most_tokens
        text = before + (prompt.text if most is None else self.tokenizer.first(prompt.text, most)) + after
        tokens = self.tokens(text, name, add_special_tokens=prompt.add_special_tokens, literals=prompt.literals)
        start = self.tokenizer.chat_start_id
        if start is None or prompt.add_special_tokens:
            return tokens
        word = self.tokenizer.raw.id_to_token(start) or ""
        written = start in tokens and prompt.text.lstrip().startswith(word)  # a template may begin with an empty line
        return tokens if written else [start, *tokens]

    def _short(self, prompt: FramedText) -> FramedText:
        """With as much of the text as its first tokens may come from, so that what is cut costs nothing."""
        most = None if prompt.most_tokens is None else SLACK * prompt.most_tokens * self.tokenizer.longest
        return replace(prompt, text=prompt.text[:most])

    def _truncate(self, tokens: list[int], command: Command) -> list[int]:
        return tokens if command.truncate_prompt_tokens is None else tokens[-command.truncate_prompt_tokens :]

    def _echo(self, prompt: FramedText | tuple[int, ...], whole: list[int], kept: list[int]) -> str:
        if isinstance(prompt, FramedText) and len(kept) == len(whole):
            return prompt.text  # as it was given
        return self.tokenizer.decode(kept, skip_special_tokens=False)

    def _start_of_text(self, name: str) -> list[int]:
        for token in (self.tokenizer.bos_token_id, self.info.bos_token_id, *self.info.eos_token_ids):
            if token is not None and token < self.info.vocab_size:
                return [token]
        raise InvalidRequest(
            f"{name} is empty, and this model has no start-of-text token to begin from", name.partition("[")[0]
        )

    def _ends(self, command: Command) -> frozenset[int]:
        """The tokens that end an answer."""
        goes_on = command.stops.ignore_eos and not command.is_formed  # nothing follows the end of a grammar
        return frozenset((*command.stops.stop_token_ids, *(() if goes_on else self.info.eos_token_ids)))

    def _control_tokens(self, command: Command, ends: frozenset[int]) -> frozenset[int]:
        """Those of the tokens that end an answer that are no text: special tokens, and markers of its parts."""
        markers = () if command.chat is None else command.chat.form.markers
        known = {*self.info.eos_token_ids, *map(self.tokenizer.raw.token_to_id, markers)}
        return frozenset(token for token in ends if token in known or self.tokenizer.is_special(token))

    def _marker_tokens(self, command: Command) -> dict[int, str]:
        """Special tokens that mark the parts of an answer."""
        if command.chat is None:
            return {}
        return {token: text for text, token in self.tokenizer.special_ids(command.chat.form.markers).items()}

    def _request(self, request_id: str, prompt: list[int], command: Command, seed: int, answer_index: int) -> Request:
        stops = command.stops
        left = max(1, self.info.max_model_len - len(prompt))
        return Request(
            request_id=request_id,
            prompt=prompt,
            max_tokens=left if stops.max_tokens is None else stops.max_tokens,
            sampling=command.sampling,
            seed=seed,
            answer_index=answer_index,
            min_tokens=stops.min_tokens,
            decoding=command.decoding,
            banned_tokens=self._banned_tokens,
            logprobs=command.logprobs,
            scored_token_ids=command.scored_token_ids,
            prompt_logprobs=command.prompt_logprobs,
            pooling=None if command.embedding is None else command.embedding.pooling,
            owner=command.caller.owner,
            weight=command.caller.weight,
            is_background=command.caller.is_batch,
            output=list(command.resume_token_ids),
        )

    def _bad_words(self, words: tuple[str, ...]) -> list[list[int]]:
        """Each word as it stands, and as it stands after a space: tokenizers join a word with the space before it."""
        spellings = (spelling for word in words for spelling in (word, " " + word))
        return [
            tokens
            for spelling in dict.fromkeys(spellings)
            if (tokens := self.tokenizer.encode(spelling, add_special_tokens=False))
        ]


def _of_chat(written: ChatText) -> FramedText:
    return FramedText(written.text, add_special_tokens=False, literals=written.literals)


async def _run(work: Callable[[], T], size: int, turn: str | None) -> T:
    """The result of `work`, made here where it takes no longer than INLINE_CHARACTERS."""
    return work() if size <= INLINE_CHARACTERS else await run_in_pool(work, size, owner=turn)


def _reading(command: Command, prompts: list[FramedText | tuple[int, ...]]) -> int:
    """How long `Preparation._read` takes, in characters."""
    decoding = command.decoding
    texts = sum(prompt.num_characters for prompt in prompts if isinstance(prompt, FramedText))
    of_prompts = sum(len(prompt) for prompt in prompts if isinstance(prompt, tuple))
    others = len(decoding.allowed_token_ids) + len(command.resume_token_ids) + len(command.stops.stop_token_ids)
    ids = others + len(decoding.logit_bias) + of_prompts * (IDS_A_CHARACTER if command.echo else 1)
    return texts + ids // IDS_A_CHARACTER + 2 * sum(map(len, decoding.bad_words)) + CHARACTERS_AN_ANSWER * len(prompts)


def _making(command: Command) -> int:
    """How long `Preparation._make_answers` takes, in characters."""
    resumed = CHARACTERS_A_RESUMED_TOKEN * len(command.resume_token_ids)
    return CHARACTERS_AN_ANSWER * command.num_answers + resumed + sum(map(len, command.stops.stop))


def _start_grammar(compiled: CompiledGrammar, received: tuple[int, ...]) -> Grammar:
    """A grammar in its state after the tokens received so far."""
    grammar = compiled.start()
    try:
        for token in received:
            grammar.advance(token)
    except EngineFailed as error:
        raise InvalidRequest("resume_token_ids does not follow the structured output asked for", "resume_token_ids") from error
    return grammar
