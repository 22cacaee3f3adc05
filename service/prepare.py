"""From a command to the answers that are to be made: tokens, checks against the model, engine requests."""

import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from model.engine.request import EngineInfo, Request, check_fits
from model.errors import ContextTooLong, EngineFailed, InvalidRequest
from model.grammar import GrammarCompiler, GrammarSpec
from model.mask import CompiledGrammar, Grammar
from model.params import MAX_PROMPT_SCORES, token_ids
from model.tokenizer import Tokenizer
from service.answer import Answer
from service.aside import aside
from service.records import Command, Prompt
from service.text import TextStream

INLINE_CHARACTERS = 4096
"""Longer prompts are tokenized in a thread, so that the event loop goes on serving streams."""
COMPILES = 8
"""Compiling a grammar takes so many times longer than tokenizing a text of its length: a tenth of a second and more."""
_compiling = ThreadPoolExecutor(2, "attend-grammar")
"""Threads of their own: each waits for a child process, and short texts would wait with them."""
SLACK = 4
"""A prompt with so many times more characters than its context could hold is refused before it costs anything."""
SEED_BITS = 48
"""Server-chosen seeds survive a JSON reader that keeps numbers as doubles."""


class Preparation:
    """Knows the model's vocabulary and limits, and its tokenizer."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self.grammars = GrammarCompiler(tokenizer, info.vocab_size, info.eos_token_ids)

    async def answers(self, command: Command) -> dict[str, Answer]:
        """The answers to make, by the ids of their engine requests. Raises InvalidRequest with the field named."""
        self._check_ids(command)
        given = command.sampling.seed
        seed = secrets.randbits(SEED_BITS) if given is None else given
        whole = [await self._tokens(prompt) for prompt in command.prompts]
        prompts = [self._truncated(tokens, command) for tokens in whole]
        if command.prompt_logprobs is not None:
            self._check_scores(command.prompt_logprobs + 1, command.n * sum(map(len, prompts)))
        echoes = [self._echo(*each) for each in zip(command.prompts, whole, prompts, strict=True)] if command.echo else []
        grammar = None if command.grammar is None else await self.compiled(command.grammar)
        unique = secrets.token_hex(8)  # callers choose their own ids, and may choose one twice
        answers = {}
        for index in range(command.n * len(prompts)):
            place = index // command.n
            request = self._request(f"{unique}-{index}", prompts[place], command, seed, index)
            check_fits(request, self.info.max_model_len)
            request.grammar = None if grammar is None else _started(grammar, command.resume_token_ids)
            text = TextStream(self.tokenizer, command.stops, skip_special_tokens=command.skip_special_tokens)
            echo = echoes[place] if command.echo else ""
            answer = Answer(index, request, command.stops, text, self.info.eos_token_ids, echo)
            answer.resume()
            answers[request.request_id] = answer
        return answers

    async def tokens(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, made beside the event loop where that takes long."""
        limit = self.info.max_model_len
        if len(text) > SLACK * limit * self.tokenizer.longest:
            size = f"{limit} tokens, which {len(text)} characters cannot fit"
            raise ContextTooLong(f"prompt: this model's maximum context length is {size}", "prompt")
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        tokens = await aside(encode, len(text)) if len(text) > INLINE_CHARACTERS else encode()
        if tokens and max(tokens) >= self.info.vocab_size:  # a tokenizer may know more than the model does
            raise InvalidRequest(f"prompt has the token {max(tokens)}, which this model does not know", "prompt")
        return tokens

    async def compiled(self, spec: GrammarSpec) -> CompiledGrammar:
        """A grammar, compiled beside the event loop. Raises InvalidRequest that says where it is wrong."""
        return await aside(partial(self.grammars.compile, spec), COMPILES * len(spec.text), _compiling)

    def _check_ids(self, command: Command) -> None:
        size, decoding = self.info.vocab_size, command.decoding
        token_ids("stop_token_ids", command.stops.stop_token_ids, size)
        token_ids("allowed_token_ids", decoding.allowed_token_ids, size)
        token_ids("logit_bias", tuple(decoding.logit_bias), size)
        token_ids("resume_token_ids", command.resume_token_ids, size)

    def _check_scores(self, each: int, tokens: int) -> None:
        """Refuse a call whose answer would be nothing but scores, and hundreds of MB of them."""
        if each * tokens > MAX_PROMPT_SCORES:
            wanted = f"prompt_logprobs may ask for at most {MAX_PROMPT_SCORES} log probabilities of prompt tokens in all"
            raise InvalidRequest(f"{wanted}; got {each} for each of {tokens} tokens", "prompt_logprobs")

    async def _tokens(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return await self.tokens(prompt) or self._start_of_text()
        if not prompt:
            raise InvalidRequest("prompt must hold at least one token id; got an empty list", "prompt")
        return list(token_ids("prompt", prompt, self.info.vocab_size))

    def _truncated(self, tokens: list[int], command: Command) -> list[int]:
        return tokens if command.truncate_prompt_tokens is None else tokens[-command.truncate_prompt_tokens :]

    def _echo(self, prompt: Prompt, whole: list[int], kept: list[int]) -> str:
        as_given = isinstance(prompt, str) and len(kept) == len(whole)
        return prompt if as_given and isinstance(prompt, str) else self.tokenizer.decode(kept, skip_special_tokens=False)

    def _start_of_text(self) -> list[int]:
        for token in (self.tokenizer.bos_token_id, self.info.bos_token_id, *self.info.eos_token_ids):
            if token is not None:
                return [token]
        raise InvalidRequest("prompt is empty, and this model has no start-of-text token to begin from", "prompt")

    def _request(self, request_id: str, prompt: list[int], command: Command, seed: int, choice: int) -> Request:
        stops = command.stops
        left = max(1, self.info.max_model_len - len(prompt))
        goes_on = stops.ignore_eos and command.grammar is None  # nothing follows the end of a grammar
        end = () if goes_on else self.info.eos_token_ids
        return Request(
            request_id=request_id,
            prompt=prompt,
            max_tokens=left if stops.max_tokens is None else stops.max_tokens,
            sampling=command.sampling,
            seed=seed,
            choice=choice,
            stop_token_ids=frozenset((*stops.stop_token_ids, *end)),
            min_tokens=stops.min_tokens,
            decoding=command.decoding,
            bad_words=self._bad_words(command.decoding.bad_words),
            logprobs=command.logprobs,
            prompt_logprobs=command.prompt_logprobs,
            cache_salt=command.cache_salt,
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


def _started(compiled: CompiledGrammar, received: tuple[int, ...]) -> Grammar:
    """A grammar at the place that the tokens received so far lead to."""
    grammar = compiled.start()
    try:
        for token in received:
            grammar.advance(token)
    except EngineFailed as error:
        raise InvalidRequest("resume_token_ids does not follow the structured output asked for", "resume_token_ids") from error
    return grammar
