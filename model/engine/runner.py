"""Turns a plan into tensors, runs the decoder, draws tokens. The only part of the engine that sees torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.engine.request import Request
from model.engine.scheduler import Plan, Scheduled, StepResult
from model.net.backends import AttentionBackend, BatchLayout, KVCache, Row, paged
from model.net.transformer import Decoder
from model.sampling import Draw, sample


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that the device may still be busy with."""

    drawing: Sequence[Request]
    tokens_R: Tensor | None

    def result(self) -> StepResult:
        """Wait for the device. A row without a finite score is an error of its own request."""
        tokens = [] if self.tokens_R is None else self.tokens_R.tolist()
        pairs = list(zip((request.request_id for request in self.drawing), tokens, strict=True))
        return StepResult(
            tokens={name: token for name, token in pairs if token >= 0},
            errors={name: "the model's scores are not finite" for name, token in pairs if token < 0},
        )


class ModelRunner:
    """A decoder, its KV cache, and the attention backend between them."""

    def __init__(self, net: Decoder, backend: AttentionBackend, cache: KVCache, device: str) -> None:
        self.net = net
        self.backend = backend
        self.cache = cache
        self.device = device

    @torch.inference_mode()
    def submit(self, plan: Plan) -> PendingStep:
        """Start a step. On a GPU this returns before the device is done."""
        items = sorted(plan.scheduled, key=lambda item: item.count != 1)  # rows of one token first
        layout = BatchLayout.build(
            [Row(item.request.blocks, item.start, item.count) for item in items], self.cache.block_size, self.device
        )
        tokens = [token for item in items for token in item.request.tokens(item.start, item.count)]
        tokens_T = torch.tensor(tokens, device=self.device)
        hidden_TE = self.net(tokens_T, layout.positions_T, paged(self.backend, self.cache, layout))
        drawing, last = _last_rows(items)
        if not drawing:
            return PendingStep((), None)
        logits_RV = self.net.logits(hidden_TE[torch.tensor(last, device=self.device)])
        return PendingStep(drawing, sample(logits_RV, [_draw(request) for request in drawing]))


def _last_rows(items: Sequence[Scheduled]) -> tuple[list[Request], list[int]]:
    """The requests that draw a token in this step, and the row of each one's last token."""
    drawing, rows, end = [], [], 0
    for item in items:
        end += item.count
        if item.draws:
            drawing.append(item.request)
            rows.append(end - 1)
    return drawing, rows


def _draw(request: Request) -> Draw:
    banned = tuple(request.stop_token_ids) if len(request.output) < request.min_tokens else ()
    return Draw(request.sampling, request.seed, request.choice, request.num_tokens, banned)
