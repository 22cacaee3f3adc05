"""A route of the contract bound to the function that answers it."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import APIRouter
from fastapi.responses import Response

from attend.service.contract.routes import Route

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])


def bind(router: APIRouter, route: Route) -> Callable[[Handler], Handler]:
    """A decorator: the function answers this route, under what the contract says of it."""
    about = {"tags": [route.tag], "summary": route.summary, "response_description": "The answer."}
    return router.api_route(route.path, methods=[route.method], **about)  # type: ignore[arg-type]  # about's values differ
