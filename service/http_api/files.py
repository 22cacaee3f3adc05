"""/v1/files: uploads for batches, and the output files of batches."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect

from attend.model.errors import InvalidRequest
from attend.model.params import describe
from attend.service.batch.files import INPUT, OUTPUT
from attend.service.batch.rows import File, owner_of
from attend.service.batch.service import BatchService
from attend.service.batch.upload import boundary_of, upload
from attend.service.batch_settings import OFF
from attend.service.contract.batches import FileDeleted, FileObject
from attend.service.contract.routes import FILE, FILE_CONTENT, FILE_DELETE, FILES, UPLOAD
from attend.service.errors import ClientGone, NotThere, SlowBody, WrongMediaType
from attend.service.generation.cooperative import LONG_BODIES, yield_to_loop
from attend.service.generation.unread_bodies import MESSAGE_SECONDS
from attend.service.http_api.body import Reading
from attend.service.http_api.json_pieces import json_answer
from attend.service.http_api.route_deps import RouteDeps, bind

T = TypeVar("T")
LEAST_RATE = 1 << 20
"""Bytes a second that an upload must come with, beside the seconds that any body has."""
MAX_LISTED = 10_000
FileIdPath = Annotated[str, Path(description="The file's id.", examples=["file-0123456789abcdef0123456789abcdef"])]


class Query:
    """The parameters `known_names` of a URL's query. Raises InvalidRequest for another name, and for one that comes twice."""

    def __init__(self, request: Request, *known_names: str) -> None:
        pairs = request.query_params.multi_items()
        self._given = dict(pairs)
        for name, _ in pairs:
            if name not in known_names:
                known = ", ".join(known_names)
                raise InvalidRequest(f"{describe(name)} is not a parameter of this route; known: {known}", name[:64])
        if len(self._given) < len(pairs):
            raise InvalidRequest("a parameter is given more than once")

    def text(self, name: str, values: Sequence[str] = ()) -> str | None:
        """The value if there is one, and one of `values` where there are any."""
        value = self._given.get(name) or None
        if value is not None and values and value not in values:
            raise InvalidRequest(f"{name} must be {' or '.join(map(repr, values))}; got {describe(value)}", name)
        return value

    def limit(self, default: int, most: int) -> int:
        """How many objects a page may have."""
        text = self._given.get("limit", str(default))
        # int() takes more than digits, such as 1_000, and refuses very long ones
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0
        if not 1 <= value <= most:
            raise InvalidRequest(f"limit must be an integer from 1 to {most}; got {describe(text)}", "limit")
        return value


async def ask_folder(deps: RouteDeps, request: Request, what: Callable[[BatchService], Callable[..., T]], object_id: str) -> T:
    """What the folder says of a file or a batch of the caller."""
    batch_service = batch_service_of(deps)
    return await batch_service.db(what(batch_service), owner_of(request.state.caller), object_id)


def batch_service_of(deps: RouteDeps) -> BatchService:
    """What keeps files and batches. Raises NotThere where they are switched off."""
    if deps.batch_service is None:
        raise NotThere(OFF)
    return deps.batch_service


@contextmanager
def refused_as(field: str, kind: str, object_id: str | None) -> Iterator[None]:
    """What the caller does not have, of the id `object_id`, is refused by the field of the call that names it."""
    try:
        yield
    except NotThere as error:
        raise NotThere(f"{field}: there is no {kind} {(object_id or '')[:64]!r}", field) from error


def add_files(router: APIRouter, deps: RouteDeps) -> None:
    """Add the routes of /v1/files."""
    _add_upload(router, deps)

    @bind(router, FILES)
    async def list_files(request: Request) -> Response:
        """Files of the caller: `limit` of them (10,000) beyond the one of id `after`, in the `order` desc or asc."""
        batch_service, asked = batch_service_of(deps), Query(request, "purpose", "limit", "order", "after")
        purpose, limit = asked.text("purpose", (INPUT, OUTPUT)), asked.limit(MAX_LISTED, MAX_LISTED)
        newest = asked.text("order", ("desc", "asc")) != "asc"
        after, owner = asked.text("after"), owner_of(request.state.caller)
        with refused_as("after", "file", after):
            found, more = await batch_service.db(
                batch_service.files.list_files, owner, after, limit, purpose, newest_first=newest
            )
        return json_answer(list_object(list(map(file_object, found)), more=more))

    @bind(router, FILE)
    async def retrieve_file(request: Request, file_id: FileIdPath) -> Response:
        """What is known of a file of the caller."""
        return json_answer(file_object(await ask_folder(deps, request, lambda kept: kept.files.file, file_id)))

    @bind(router, FILE_DELETE)
    async def delete_file(request: Request, file_id: FileIdPath) -> Response:
        """Delete a file of the caller that no unfinished batch reads."""
        await ask_folder(deps, request, lambda kept: kept.files.delete, file_id)
        deleted: FileDeleted = {"id": file_id, "object": "file", "deleted": True}
        return json_answer(deleted)

    @bind(router, FILE_CONTENT)
    async def download_file(request: Request, file_id: FileIdPath) -> Response:
        """The bytes of a file of the caller."""
        file = await ask_folder(deps, request, lambda kept: kept.files.file, file_id)
        size, pieces = await batch_service_of(deps).content(file.owner, file.id)
        headers = {  # of the id alone: a caller's own name could end the header
            "content-length": str(size),
            "content-disposition": f'attachment; filename="{file.id}.jsonl"',
            "x-content-type-options": "nosniff",
        }
        return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")


def _add_upload(router: APIRouter, deps: RouteDeps) -> None:
    @bind(router, UPLOAD)
    async def upload_file(request: Request) -> Response:
        """Keep a file for a batch: a form with `purpose`, which is `batch`, and `file`."""
        batch_service, remarks, caller = batch_service_of(deps), deps.remarks(), request.state.caller
        given = request.headers.get("content-type", "")
        if given.partition(";")[0].strip().lower() != "multipart/form-data":
            raise WrongMediaType(f"Content-Type must be multipart/form-data; got {given[:64]!r}")
        if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise WrongMediaType("Content-Encoding must be identity")
        boundary, text = boundary_of(given), request.headers.get("content-length", "")
        length = int(text[:20]) if text.isdecimal() else None
        with batch_service.uploads.hold(caller.turn):
            pieces = _pieces(request, batch_service.limits.batch_file_bytes if length is None else length)
            file = await upload(batch_service, owner_of(caller), boundary, length, pieces, remarks)
        return deps.with_remarks(json_answer(file_object(file)), remarks, request)


async def _pieces(request: Request, size: int) -> AsyncIterator[bytes]:
    """The body as it comes, one piece in a round of the event loop. Raises SlowBody, ClientGone or Overloaded."""
    reading: Reading = request.state.reading
    seconds = MESSAGE_SECONDS + size / LEAST_RATE
    end = asyncio.get_running_loop().time() + seconds
    stream = request.stream()
    with reading.unread_bodies.call(reading.arrival.turn) as call:
        while True:
            try:
                async with call.waiting(max(0.0, end - asyncio.get_running_loop().time())):
                    piece = await anext(stream, None)
            except SlowBody as error:
                raise SlowBody(f"the file must arrive within {seconds:.0f} seconds") from error
            except ClientDisconnect as error:
                raise ClientGone("the caller left before the end of the file") from error
            if piece is None:
                return
            yield piece
            await yield_to_loop(LONG_BODIES)


def file_object(file: File) -> FileObject:
    """A file, as OpenAI writes it."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created,
        "expires_at": file.expires,
        "filename": file.filename,
        "purpose": "batch" if file.purpose == INPUT else "batch_output",
        "status": "processed",
    }


def list_object(data: list[Any], *, more: bool) -> Any:
    """A page of files or batches, as OpenAI writes it: a FileList or a BatchList."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "has_more": more, "first_id": first, "last_id": last}
