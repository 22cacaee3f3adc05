"""Errors in OpenAI's shape, of every origin: ours, the router's (404, 405), or a bug."""

import logging

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from attend.model.errors import AttendError, DeadlineExceeded, Unauthenticated
from attend.service.contract.answers import Error
from attend.service.errors import INTERNAL, advice, field_of, sentence, wire

log = logging.getLogger("attend.http")


def error_body(error: BaseException, request_id: str) -> Error:
    """What is said of an error."""
    row = wire(error)
    return {"error": {"message": sentence(error, request_id), "type": row.kind, "param": field_of(error), "code": row.code}}


def error_response(error: BaseException, request_id: str) -> Response:
    """The answer to a call that failed before its first token."""
    headers = advice(error)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, DeadlineExceeded):
        headers["x-should-retry"] = "false"
    body = orjson.dumps(error_body(error, request_id))
    return Response(body, wire(error).status, headers, "application/json")


def install(app: FastAPI) -> None:
    """Have every error of `app` answered in this shape."""

    async def ours(request: Request, error: Exception) -> Response:
        if wire(error) is INTERNAL:
            log.error("request %s failed", request.state.request_id, exc_info=error)
        return error_response(error, request.state.request_id)

    async def routers(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method[:16]} {request.url.path[:128]}: {error.detail}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        document: Error = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
        return Response(orjson.dumps(document), error.status_code, error.headers, "application/json")

    app.add_exception_handler(AttendError, ours)
    app.add_exception_handler(HTTPException, routers)
    app.add_exception_handler(Exception, ours)
