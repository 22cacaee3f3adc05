"""/v1/batches: many requests in a file, computed when nobody else needs the engine."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response
from starlette.types import ASGIApp

from attend.model.errors import InvalidRequest, ModelNotFound
from attend.model.params import describe
from attend.service.batch.files import INPUT
from attend.service.batch.routes import Routes
from attend.service.batch.rows import ENDPOINTS, WINDOW, Batch, owner_of
from attend.service.contract.batches import (
    MAX_KEY,
    MAX_METADATA,
    MAX_VALUE,
    BatchError,
    BatchErrors,
    BatchObject,
    BatchRequest,
)
from attend.service.contract.routes import BATCH, BATCH_CANCEL, BATCH_CREATE, BATCHES, EMBEDDINGS
from attend.service.generation.generation import DIGITS, GenerationService
from attend.service.http_api.body import MAX_BYTES, parse_json, read_json
from attend.service.http_api.files import Query, ask_folder, batch_service_of, list_object, refused_as
from attend.service.http_api.internal_calls import ask
from attend.service.http_api.json_pieces import json_answer
from attend.service.http_api.route_deps import RouteDeps, bind

OF_TEXTS = (EMBEDDINGS.path,)
"""Routes whose bodies may be longer than the model's context."""
LISTED, MAX_LISTED = 20, 100
BatchIdPath = Annotated[str, Path(description="The batch's id.", examples=["batch_0123456789abcdef0123456789abcdef"])]


def routes_of(deps: RouteDeps, app: ASGIApp) -> Routes:
    """The server as the lines of batches see it; `app` is all of it."""
    return Routes(
        ask=partial(ask, app),
        parse=parse_json,
        most_bytes=lambda path: deps.most_bytes_of_texts if path in OF_TEXTS else deps.most_bytes,
        check_model=deps.service.check_model,
        identity=partial(_identity, deps.service),
    )


def _identity(service: GenerationService, name: str) -> str:
    """Name and digests of what answers a line that names this model, or of the served model where it is none."""
    adapter = None
    with suppress(ModelNotFound):
        adapter = service.find(name or service.model_name)
    weights = service.engine.info.weights_digest
    return f"{service.model_name!r} ({weights})" if adapter is None else f"{name!r} ({weights}-{adapter.digest[:DIGITS]})"


def add_batches(router: APIRouter, deps: RouteDeps) -> None:
    """Add the routes of /v1/batches."""
    _add_create(router, deps)

    @bind(router, BATCHES)
    async def list_batches(request: Request) -> Response:
        """Batches of the caller, the newest first: `limit` of them (20) beyond the one of id `after`."""
        batch_service, asked = batch_service_of(deps), Query(request, "limit", "after")
        limit, after, owner = asked.limit(LISTED, MAX_LISTED), asked.text("after"), owner_of(request.state.caller)
        with refused_as("after", "batch", after):
            found, more = await batch_service.db(batch_service.batches.list_batches, owner, after, limit)
        return json_answer(list_object(list(map(batch_object, found)), more=more))

    @bind(router, BATCH)
    async def retrieve_batch(request: Request, batch_id: BatchIdPath) -> Response:
        """How far a batch of the caller is."""
        return json_answer(batch_object(await ask_folder(deps, request, lambda kept: kept.batches.batch, batch_id)))

    @bind(router, BATCH_CANCEL)
    async def cancel_batch(request: Request, batch_id: BatchIdPath) -> Response:
        """Compute no more lines of a batch of the caller. What is answered is kept; one that has ended stays as it is."""
        batch = await ask_folder(deps, request, lambda kept: kept.batches.cancel, batch_id)
        batch_service_of(deps).woken.set()
        return json_answer(batch_object(batch))


def _add_create(router: APIRouter, deps: RouteDeps) -> None:
    @bind(router, BATCH_CREATE)
    async def create_batch(request: Request) -> Response:
        """Have the lines of a file computed, within 24 hours."""
        batch_service, remarks = batch_service_of(deps), deps.remarks()
        owner = owner_of(request.state.caller)
        body = await read_json(request, lambda fields: BatchRequest.read(fields, remarks), MAX_BYTES)
        if body.input_file_id is None:
            raise InvalidRequest("input_file_id is required", "input_file_id")
        file_id, endpoint = body.input_file_id, _one_of("endpoint", body.endpoint, ENDPOINTS)
        _one_of("completion_window", body.completion_window, (WINDOW,))
        metadata = _metadata(body.metadata or {})
        with refused_as("input_file_id", "file", file_id):
            file = await batch_service.db(batch_service.files.file, owner, file_id)
        if file.purpose != INPUT:
            raise InvalidRequest(
                f"input_file_id must be a file of the purpose {INPUT!r}; {file_id} has {file.purpose!r}", "input_file_id"
            )
        batch = await batch_service.db(batch_service.batches.create, owner, file_id, endpoint, metadata)
        batch_service.woken.set()
        return deps.with_remarks(json_answer(batch_object(batch)), remarks, request)


def _one_of(name: str, value: str | None, values: tuple[str, ...]) -> str:
    if value not in values:
        wanted = f"one of {', '.join(map(repr, values))}" if len(values) > 1 else repr(values[0])
        said = "is required: it must be" if value is None else "must be"
        raise InvalidRequest(f"{name} {said} {wanted}{'' if value is None else f'; got {describe(value)}'}", name)
    return value


def _metadata(given: Mapping[str, Any]) -> dict[str, str]:
    if len(given) > MAX_METADATA:
        raise InvalidRequest(f"metadata must have at most {MAX_METADATA} pairs; got {len(given)}", "metadata")
    for name, value in given.items():
        if len(name) > MAX_KEY or not isinstance(value, str) or len(value) > MAX_VALUE:
            limits = f"keys of at most {MAX_KEY} characters and texts of at most {MAX_VALUE}"
            raise InvalidRequest(f"metadata must have {limits}; {describe(name)} has {describe(value)}", "metadata")
    return dict(given)


def batch_object(batch: Batch) -> BatchObject:
    """A batch, as OpenAI writes it."""
    counts, usage, times = batch.counts, batch.counts.usage, batch.times
    failures: BatchErrors = {"object": "list", "data": [*map(_error_object, batch.errors)]}
    shown: BatchObject = {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": failures if batch.errors else None,
        "input_file_id": batch.input_file,
        "completion_window": WINDOW,
        "status": batch.status,  # type: ignore[typeddict-item]  # one of them
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": batch.created,
        "in_progress_at": times.get("in_progress"),
        "expires_at": batch.expires,
        "finalizing_at": times.get("finalizing"),
        "completed_at": times.get("completed"),
        "failed_at": times.get("failed"),
        "expired_at": times.get("expired"),
        "cancelling_at": times.get("cancelling"),
        "cancelled_at": times.get("cancelled"),
        "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached_prompt},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        },
        "metadata": batch.metadata or None,
    }
    if batch.model:
        shown["model"] = batch.model
    return shown


def _error_object(error: Mapping[str, Any]) -> BatchError:
    return {"code": error["code"], "line": error["line"], "message": error["message"], "param": error["param"]}
