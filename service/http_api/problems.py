"""Error responses in OpenAI's and Anthropic's shapes, also for 404, 405 and bugs."""

import logging
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from attend.model.errors import AttendError, ContextTooLong, DeadlineExceeded, Unauthenticated
from attend.service.contract.answers import Error
from attend.service.contract.anthropic import AnthropicError, AnthropicProblem
from attend.service.contract.routes import MESSAGES, PROBES, ROUTES
from attend.service.errors import INTERNAL, advice, field_of, sentence, wire
from attend.service.http_api.json_pieces import json_bytes

log = logging.getLogger("attend.http")
METHODS = [(route.path, route.method) for route in ROUTES] + [(path, method) for path in PROBES for method in ("GET", "HEAD")]
PATTERNS = [(compile_path(path)[0], method) for path, method in METHODS]


def error_body(error: BaseException, request_id: str) -> Error:
    """The body of the answer to a call that failed."""
    row = wire(error)
    return {"error": {"message": sentence(error, request_id), "type": row.kind, "param": field_of(error), "code": row.code}}


ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's kinds of errors, by status; another status of a caller's is the first, and of ours is api_error."""


def anthropic_body(error: BaseException, request_id: str) -> AnthropicError:
    """What is said of an error on the routes of Anthropic's API."""
    document = error_body(error, request_id)
    if isinstance(error, ContextTooLong) and error.prompt_tokens is not None:
        document["error"]["message"] = _too_long(error)
    return in_anthropics(document, wire(error).status, request_id)


def _too_long(error: ContextTooLong) -> str:
    """Anthropic's sentences: clients that shorten conversations know an overflow by them."""
    if error.max_tokens is None:
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    sum_of = f"{error.prompt_tokens} + {error.max_tokens} > {error.limit}"
    return f"input length and `max_tokens` exceed context limit: {sum_of}, decrease input length or `max_tokens` and try again"


def in_anthropics(document: Error, status: int, request_id: str) -> AnthropicError:
    """An error in Anthropic's shape."""
    problem = document["error"]
    kind = ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    said: dict[str, Any] = {"type": kind, "message": problem["message"], "code": problem["code"], "param": problem["param"]}
    if problem["param"] == "thread":
        said["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": cast(AnthropicProblem, said), "request_id": request_id}


def is_anthropics(path: str) -> bool:
    """True if a path is of Anthropic's API."""
    return path == MESSAGES.path or path.startswith(f"{MESSAGES.path}/")


def error_response(error: BaseException, request_id: str, path: str = "") -> Response:
    """The answer to a call that failed before its first token."""
    headers = advice(error)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, DeadlineExceeded):
        headers["x-should-retry"] = "false"
    body = anthropic_body(error, request_id) if is_anthropics(path) else error_body(error, request_id)
    return Response(json_bytes(body), wire(error).status, headers, "application/json")


def _allow(error: HTTPException, request: Request) -> str:
    """The methods of a path. Several routes may have it, and the router names those of the first."""
    methods = dict.fromkeys(method for pattern, method in PATTERNS if pattern.match(request.url.path))
    return ", ".join(methods) or (error.headers or {}).get("Allow", "")


def install_error_handlers(app: FastAPI) -> None:
    """Have every error of `app` answered in this shape."""

    async def ours(request: Request, error: Exception) -> Response:
        if wire(error) is INTERNAL:
            log.error("request %s failed", request.state.request_id, exc_info=error)
        return error_response(error, request.state.request_id, request.url.path)

    async def routers(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status, headers, way_out = error.status_code, {**(error.headers or {})}, ""
        if status == 405:
            headers["Allow"] = _allow(error, request)
            way_out = f": it takes {headers['Allow']}"
        elif status == 404 and any(getattr(route, "path", "") == "/docs" for route in request.app.routes):
            way_out = ": /docs has the routes"
        message = f"{request.method[:16]} {request.url.path[:128]}: {error.detail}{way_out}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_request")
        document: Error = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
        is_theirs = is_anthropics(request.url.path)
        shaped = in_anthropics(document, status, request.state.request_id) if is_theirs else document
        return Response(json_bytes(shaped), status, headers, "application/json")

    app.add_exception_handler(AttendError, ours)
    app.add_exception_handler(HTTPException, routers)
    app.add_exception_handler(Exception, ours)
