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
        for count, token in enumerate(output.token_ids if output.finish_reason is None else self._texts(output), start=1):
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

    def _texts(self, output: Output) -> tuple[int, ...]:
        """The tokens of a last output that are text. A stop token counts and has an id, but shows no text."""
        hidden = self._stopped_by_token(output) and not self.stops.include_stop
        return output.token_ids[:-1] if hidden else output.token_ids

    def _stopped_by_token(self, output: Output) -> bool:
        """A grammar stops after a token that is text, and a drain after none."""
        if output.finish_reason is not FinishReason.STOP or not output.token_ids:
            return False
        return output.token_ids[-1] in self.request.stop_token_ids

    def _stop_token(self, output: Output) -> int | None:
        by_token = self._stopped_by_token(output) and output.token_ids[-1] not in self.eos_token_ids
        return output.token_ids[-1] if by_token else None

    def _chunk(self, output: Output, text: str, count: int, reason: FinishReason | None, stop: str | int | None) -> Chunk:
        """A chunk of the first `count` tokens of an output."""
        self.num_tokens += count
        self.finish_reason = reason
        request, prompt = self.request, None
        if not self.begun:
            prompt = PromptPart(tuple(request.prompt), output.prompt_logprobs, self.echo, request.num_cached)
            self.begun = True
        return Chunk(
            index=self.index,
            text=text,
            token_ids=output.token_ids[:count],
            num_tokens=self.num_tokens,
            num_prompt_tokens=len(request.prompt),
            seed=request.seed,
            finish_reason=reason,
            stop=stop,
            logprobs=output.logprobs[:count],
            prompt=prompt,
            times=output.times,
        )
