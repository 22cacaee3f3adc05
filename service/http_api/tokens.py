"""Token ids and strings over HTTP, in vLLM's shapes: enough for a client to need no tokenizer of its own."""

from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from attend.model.errors import InvalidRequest
from attend.service.contract import server_answers
from attend.service.contract.commands import conversation_of
from attend.service.contract.requests import ChatRequest
from attend.service.contract.routes import DETOKENIZE, TOKENIZE, TOKENIZER_INFO
from attend.service.contract.texts import DetokenizeRequest, Text, TokenizeRequest, Tokens
from attend.service.http_api.answering import template_of
from attend.service.http_api.body import read_json
from attend.service.http_api.json_pieces import json_response
from attend.service.http_api.route_deps import RouteDeps, bind
from attend.service.records import Prompt
from attend.service.remarks import Remarks


def add_tokens(router: APIRouter, deps: RouteDeps) -> None:
    """/tokenize, /detokenize and /tokenizer_info."""
    service, template = deps.service, deps.template

    @bind(router, TOKENIZE)
    async def tokenize(request: Request) -> Response:
        """Text to token ids."""
        remarks = deps.remarks()
        body = await read_json(request, partial(TokenizeRequest.read, remarks=remarks), deps.most_bytes)
        caller, arrival = request.state.caller, request.state.arrival
        service.check_model(body.model or "")
        if body.messages is not None:
            tokens = await service.tokens_of(conversation(deps, body, remarks), caller, arrival)
        else:
            if body.prompt is None:
                raise InvalidRequest("prompt is required, or messages", "prompt")
            if body.tools is not None:
                raise InvalidRequest("tools needs messages", "tools")
            special = body.add_special_tokens is not False
            tokens = await service.tokenize(body.prompt, add_special_tokens=special, caller=caller, arrival=arrival)
        limit = service.engine.info.max_model_len
        found: Tokens = {"count": len(tokens), "max_model_len": limit, "tokens": iter(tokens)}
        if body.return_token_strs:
            found["token_strs"] = map(service.tokenizer.raw.id_to_token, tokens)
        return deps.with_remarks(json_response(found), remarks, request)

    @bind(router, DETOKENIZE)
    async def detokenize(request: Request) -> Response:
        """Token ids to text."""
        remarks = deps.remarks()
        body = await read_json(request, partial(DetokenizeRequest.read, remarks=remarks), deps.most_bytes)
        service.check_model(body.model or "")
        made = await service.detokenize(body.tokens, caller=request.state.caller, arrival=request.state.arrival)
        text: Text = {"prompt": made}
        return deps.with_remarks(json_response(text), remarks, request)

    @bind(router, TOKENIZER_INFO)
    async def tokenizer_info() -> Response:
        """The special tokens and the chat template, as tokenizer_config.json has them."""
        info, facts = service.engine.info, service.tokenizer.facts
        ends = [service.tokenizer.raw.id_to_token(token) for token in info.eos_token_ids[:1]]
        known: server_answers.TokenizerInfo = {
            "eos_token": next(iter(ends), None),
            "vocab_size": info.vocab_size,
            "model_max_length": info.max_model_len,
        }
        written = {} if template is None else {"chat_template": template.source}
        return json_response({**known, **facts, **written})


def conversation(deps: RouteDeps, body: TokenizeRequest, remarks: Remarks) -> Prompt:
    """The prompt that the messages of a chat become."""
    if body.prompt is not None:
        raise InvalidRequest("prompt and messages cannot both be given", "prompt")
    names = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    chat = ChatRequest.read(given, remarks)
    (prompt,) = conversation_of(chat, template_of(deps), deps.form, remarks)["prompts"]
    return prompt  # type: ignore[no-any-return]
