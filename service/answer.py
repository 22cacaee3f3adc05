"""One answer in the making: what the engine's outputs mean for its text, its count and its end."""

from dataclasses import dataclass

from model.engine.request import FinishReason, Output, Request
from model.params import StopRules
from service.records import Chunk
from service.text import TextStream


@dataclass(slots=True)
class Answer:
    """Answer `index` of a call, and the engine request that makes it."""

    index: int
    request: Request
    stops: StopRules
    text: TextStream
    eos_token_ids: tuple[int, ...]
    num_tokens: int = 0
    finish_reason: FinishReason | None = None

    def take(self, output: Output) -> Chunk:
        """The chunk that an output makes. A stop string ends the answer, whatever else the output holds."""
        shown = ""
        for count, token in enumerate(output.token_ids, start=1):
            ends = output.finish_reason is FinishReason.STOP and count == len(output.token_ids)
            if ends and not self.stops.include_stop:
                break  # a stop token counts and has an id, but shows no text
            piece, hit = self.text.push(token)
            shown += piece
            if hit is not None:
                return self._chunk(shown, output.token_ids[:count], FinishReason.STOP, hit)
        if output.finish_reason is None:
            return self._chunk(shown, output.token_ids, None, None)
        piece, hit = self.text.finish()
        reason = output.finish_reason if hit is None else FinishReason.STOP
        return self._chunk(shown + piece, output.token_ids, reason, self._stop_token(output) if hit is None else hit)

    def _stop_token(self, output: Output) -> int | None:
        if output.finish_reason is not FinishReason.STOP or output.token_ids[-1] in self.eos_token_ids:
            return None
        return output.token_ids[-1]

    def _chunk(self, text: str, token_ids: tuple[int, ...], reason: FinishReason | None, stop: str | int | None) -> Chunk:
        self.num_tokens += len(token_ids)
        self.finish_reason = reason
        return Chunk(
            index=self.index,
            text=text,
            token_ids=token_ids,
            num_tokens=self.num_tokens,
            num_prompt_tokens=len(self.request.prompt),
            seed=self.request.seed,
            finish_reason=reason,
            stop=stop,
        )
