"""One answer in the making: what the engine's outputs mean for its text, its count and its end."""

from dataclasses import dataclass, field

from model.engine.request import FinishReason, Output, Request
from model.errors import InvalidRequest
from model.params import StopRules
from service.records import Chunk, PromptPart
from service.text import TextStream


@dataclass(slots=True)
class Answer:
    """Answer `index` of a call, and the engine request that makes it."""

    index: int
    request: Request
    stops: StopRules
    text: TextStream
    eos_token_ids: tuple[int, ...]
    echo: str = ""
    """The prompt's text, where the answer is to begin with it."""
    num_tokens: int = field(init=False, default=0)
    finish_reason: FinishReason | None = field(init=False, default=None)
    begun: bool = field(init=False, default=False)

    def resume(self) -> None:
        """Take in the tokens that the caller has already: their text was shown, what they held back is still held."""
        for token in self.request.output:
            if self.text.push(token)[1] is not None or token in self.request.stop_token_ids:
                raise InvalidRequest("resume_token_ids holds an answer that has ended already", "resume_token_ids")
        self.num_tokens = len(self.request.output)

    def take(self, output: Output) -> Chunk:
        """The chunk that an output makes. A stop string ends the answer, whatever else the output holds."""
        shown = ""
        for count, token in enumerate(output.token_ids, start=1):
            stopped = output.finish_reason is FinishReason.STOP and count == len(output.token_ids)
            ends = stopped and token in self.request.stop_token_ids  # a grammar stops after a token that is text
            if ends and not self.stops.include_stop:
                break  # a stop token counts and has an id, but shows no text
            piece, hit = self.text.push(token)
            shown += piece
            if hit is not None:
                return self._chunk(output, shown, count, FinishReason.STOP, hit)
        if output.finish_reason is None:
            return self._chunk(output, shown, len(output.token_ids), None, None)
        piece, hit = self.text.finish()
        reason = output.finish_reason if hit is None else FinishReason.STOP
        return self._chunk(
            output, shown + piece, len(output.token_ids), reason, self._stop_token(output) if hit is None else hit
        )

    def _stop_token(self, output: Output) -> int | None:
        token = output.token_ids[-1] if output.token_ids else None
        by_token = output.finish_reason is FinishReason.STOP and token in self.request.stop_token_ids
        return token if by_token and token not in self.eos_token_ids else None

    def _chunk(self, output: Output, text: str, count: int, reason: FinishReason | None, stop: str | int | None) -> Chunk:
        """A chunk of the first `count` tokens of an output."""
        self.num_tokens += count
        self.finish_reason = reason
        prompt = (
            None
            if self.begun
            else PromptPart(tuple(self.request.prompt), output.prompt_logprobs, self.echo, self.request.num_cached)
        )
        self.begun = True
        return Chunk(
            index=self.index,
            text=text,
            token_ids=output.token_ids[:count],
            num_tokens=self.num_tokens,
            num_prompt_tokens=len(self.request.prompt),
            seed=self.request.seed,
            finish_reason=reason,
            stop=stop,
            logprobs=output.logprobs[:count],
            prompt=prompt,
            times=output.times,
        )
