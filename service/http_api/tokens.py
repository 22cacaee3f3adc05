"""Token ids and strings over HTTP, in vLLM's shapes: enough for a client to need no tokenizer of its own."""

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, StrictBool, StrictStr

from attend.model.chat import ChatTemplate
from attend.service.access.quota import Key, name_of
from attend.service.contract.mistakes import validated
from attend.service.contract.requests import TOKENS, ModelName, TokenIds
from attend.service.contract.shapes import Shape, told
from attend.service.generation.generation import GenerationService
from attend.service.http_api.body import most_bytes, read_json
from attend.service.http_api.pieces import json_response


class TokenizeRequest(Shape):
    """The body of POST /tokenize."""

    prompt: StrictStr
    """The text."""
    model: ModelName = None
    add_special_tokens: StrictBool | None = told(True)
    """With the special tokens that the checkpoint puts around a text."""
    return_token_strs: StrictBool | None = told(False)
    """Report each token as the vocabulary spells it, too."""


class DetokenizeRequest(Shape):
    """The body of POST /detokenize."""

    tokens: TokenIds = Field(description=f"Token ids. {TOKENS}")
    model: ModelName = None


def add_tokens(router: APIRouter, service: GenerationService, template: ChatTemplate | None) -> None:
    """/tokenize, /detokenize and /tokenizer_info."""
    most = most_bytes(service.engine.info.max_model_len)

    @router.post("/tokenize", tags=["tokens"], summary="Text to token ids", response_description="The tokens.")
    async def tokenize(request: Request) -> Response:
        """Text to token ids."""
        key: Key | None = request.state.key
        body = await read_json(request, partial(validated, TokenizeRequest), most, name_of(key))
        service.check_model(body.model or "")
        tokens = await service.tokenize(body.prompt, add_special_tokens=body.add_special_tokens is not False, key=key)
        texts = {"token_strs": map(service.tokenizer.raw.id_to_token, tokens)} if body.return_token_strs else {}
        limit = service.engine.info.max_model_len
        return json_response({"count": len(tokens), "max_model_len": limit, "tokens": iter(tokens), **texts})

    @router.post("/detokenize", tags=["tokens"], summary="Token ids to text", response_description="The text.")
    async def detokenize(request: Request) -> Response:
        """Token ids to text."""
        key: Key | None = request.state.key
        body = await read_json(request, partial(validated, DetokenizeRequest), most, name_of(key))
        service.check_model(body.model or "")
        return json_response({"prompt": await service.detokenize(body.tokens, key=key)})

    @router.get(
        "/tokenizer_info", tags=["tokens"], summary="The tokenizer", response_description="What the checkpoint says of it."
    )
    async def tokenizer_info() -> Response:
        """The special tokens and the chat template, as tokenizer_config.json has them."""
        info, facts = service.engine.info, service.tokenizer.facts
        ends = [service.tokenizer.raw.id_to_token(token) for token in info.eos_token_ids[:1]]
        defaults = {"eos_token": next(iter(ends), None), "vocab_size": info.vocab_size, "model_max_length": info.max_model_len}
        written = {} if template is None else {"chat_template": template.source}
        return json_response(defaults | facts | written)
