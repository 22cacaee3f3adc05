"""POST /v1/attention of a model that can be worked out by hand: its weights tell layer, head and token apart."""

import math
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from tests.fakes import MODEL, byte_tokenizer

LAYERS, HEADS = 3, 2
HOSTILE = "<img src=x onerror=alert(3)>"
"""The text of the token that is the byte <."""
STATE = 1
"""The layer that keeps a state, and has no weights."""
MAX_TOKENS, MAX_NUMBERS = 512, 524_288
SINK = 0.1


def answers(layer: int, head: int, token: int) -> int:
    """Which token gets the most weight of one that asks: the one before it, the first, and so on by layer and head."""
    return max(0, token - 1) if head == 0 else layer % (token + 1)


def weights(layer: int, head: int, token: int) -> list[float]:
    """A row: a part for all alike, the rest for one token. With the sink they sum to 1."""
    row = [0.12 / (token + 1)] * (token + 1)
    row[answers(layer, head, token)] += 0.88 - SINK
    return row


class FakeAttention:
    """The route, and what it was asked. `busy` answers so many calls with 429."""

    def __init__(self, app: FastAPI, *, layers: int = LAYERS, heads: int = HEADS, busy: int = 0) -> None:
        self.layers, self.heads, self.busy = layers, heads, busy
        self.bodies: list[dict[str, Any]] = []
        app.add_api_route("/v1/attention", self.answer, methods=["POST"])
        app.router.routes.insert(0, app.router.routes.pop())  # before any other of this path

    async def answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.busy:
            self.busy -= 1
            return refusal(429, "the engine is busy: try again")
        ids = [*ids_of(body["prompt"]), *ids_of(body.get("answer") or [])]
        if len(ids) > MAX_TOKENS:
            return refusal(400, f"prompt and answer may have at most {MAX_TOKENS} tokens; got {len(ids)}")
        layers = range(self.layers) if body.get("layers") is None else body["layers"]
        heads = range(self.heads) if body.get("heads") is None else body["heads"]
        if len(layers) * len(heads) * len(ids) * (len(ids) + 1) // 2 > MAX_NUMBERS:
            return refusal(400, "choose fewer layers or heads")
        return JSONResponse(self.document(body, ids, list(layers), list(heads)))

    def document(self, body: dict[str, Any], ids: list[int], layers: list[int], heads: list[int]) -> dict[str, Any]:
        guesses = [
            {"layer": layer, "guesses": [[told(token + layer + 1)] * body["logit_lens"] for token in ids]}
            for layer in range(self.layers if body.get("logit_lens") else 0)
        ]
        first = {"id": ids[0], "token": text(ids[0]), "logprob": None, "entropy": None, "top_logprobs": None}
        others = [told(token) | {"entropy": 2.1, "top_logprobs": [told(token), told(token + 1)]} for token in ids[1:]]
        return {
            "id": "attn-1",
            "object": "attention",
            "created": 1,
            "model": MODEL,
            "system_fingerprint": "fp_fake",
            "num_layers": self.layers,
            "num_heads": self.heads,
            "num_prompt_tokens": len(ids_of(body["prompt"])),
            "tokens": [first, *others],
            "next": {"entropy": 1.0, "top_logprobs": [told(ids[-1] + 1), told(ids[-1] + 2)]},
            "layers": [layer_of(layer, heads, len(ids)) for layer in layers],
            "logit_lens": guesses,
            "usage": {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)},
        }


def layer_of(layer: int, heads: list[int], length: int) -> dict[str, Any]:
    if layer == STATE:
        return {"layer": layer, "kind": "state", "window": None, "heads": []}
    rows = [
        {
            "head": head,
            "key_value_head": 0,
            "weights": [weights(layer, head, token) for token in range(length)],
            "sinks": [SINK] * length,
        }
        for head in heads
    ]
    return {"layer": layer, "kind": "attention", "window": None, "heads": rows}


def ids_of(given: str | list[int]) -> list[int]:
    return byte_tokenizer().encode(given, add_special_tokens=False) if isinstance(given, str) else given


def text(token: int) -> str:
    return HOSTILE if token == ord("<") else byte_tokenizer().text_of(token % 256)


def told(token: int) -> dict[str, Any]:
    return {"id": token % 256, "token": text(token), "logprob": math.log(0.5)}


def refusal(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)
