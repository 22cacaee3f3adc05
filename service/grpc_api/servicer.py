"""The gRPC methods, a base class of the deployment: Serve calls them by name, and has no interceptors."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

from google.protobuf.message import DecodeError, Message
from grpc import StatusCode
from grpc_health.v1 import health_pb2

from attend.model.errors import InvalidRequest, NoChatTemplate, Unavailable
from attend.model.params import at_most, describe
from attend.model.text.chat import ChatTemplate
from attend.service.access.caller import NOBODY, Caller, Callers
from attend.service.access.keys import KeyRing
from attend.service.chat.forms import TEXT_ALONE, AnswerFormat
from attend.service.contract import messages
from attend.service.contract.commands import to_command, to_embedding, to_explanation
from attend.service.contract.routes import SERVICE
from attend.service.errors import INTERNAL, SHUTTING_DOWN, advice, sentence, wire
from attend.service.gathered import Gathered
from attend.service.generation.aside import alone
from attend.service.generation.embed import command_of
from attend.service.generation.embed import embed as embed_texts
from attend.service.generation.explain import Explaining, explainable
from attend.service.generation.generation import GenerationService
from attend.service.generation.stall import Stall
from attend.service.generation.turns import yield_to_loop
from attend.service.grpc_api import embed, explain
from attend.service.grpc_api.convert import Request, Responses, check_sizes
from attend.service.grpc_api.limits import MAX_WATCHES
from attend.service.observe.metrics import Metrics, RequestRecord
from attend.service.records import REQUEST_ID, Command, bytes_for
from attend.service.remarks import Beyond, Remarks, clamps
from attend.v1 import generation_pb2 as pb

log = logging.getLogger("attend.grpc")

M = TypeVar("M", bound=Message)
T = TypeVar("T")
SERVICES = ("", SERVICE)
"""What a health check may ask for: the server, or its one service by name."""
MAX_CHARACTERS = 1 << 20
"""Characters to be made token ids in one call, and half as many token ids to be made text, where the model's context needs no
more: as many as a body of HTTP can hold."""
IDS = 1 << 14
"""Token ids that are written together: less than a millisecond of work."""
INLINE_BYTES = 16 << 10
"""Larger messages are read beside the event loop: reading these takes up to a millisecond."""
WATCH_SECONDS = 0.5
"""How often a health watch looks for a change."""


Incoming = bytes | Callable[[], Awaitable[bytes]]
"""A caller's message; where the server has not read it, what reads it, by the errors of `attend.service.errors`."""


class Context(Protocol):
    """The part of Serve's gRPC context that is used."""

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        """What the caller sent beside the message."""
        ...

    def peer(self) -> str:
        """Who connected, such as `ipv4:10.0.0.1:50000`."""
        ...

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, str]]) -> None:
        """What goes back beside the status."""
        ...

    def set_code(self, code: Any) -> None:
        """The status of the call."""
        ...

    def set_details(self, details: str) -> None:
        """The sentence beside it."""
        ...


class GrpcMethods:
    """attend.v1.GenerationService and grpc.health.v1.Health. The deployment sets the attributes."""

    service: GenerationService
    metrics: Metrics
    explaining: Explaining | None = None
    template: ChatTemplate | None = None
    form: AnswerFormat = TEXT_ALONE
    keys: KeyRing | None = None
    callers: Callers = Callers()
    beyond_context: Beyond = ""
    _num_watches = 0

    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        raise NotImplementedError

    async def Generate(self, message: Incoming, grpc_context: Context) -> pb.GenerateResponse:  # noqa: N802 - the proto's name
        """The whole answer at once."""
        return await self._answer("Generate", pb.GenerateRequest, message, grpc_context)

    async def GenerateStream(  # noqa: N802
        self, message: Incoming, grpc_context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The answer as it is made; each message holds what came together."""
        async with aclosing(self._stream("GenerateStream", pb.GenerateRequest, message, grpc_context)) as responses:
            with Stall() as stall:
                async for response in responses:
                    stall.writing()
                    yield response
                    stall.written()

    async def Chat(self, message: Incoming, grpc_context: Context) -> pb.GenerateResponse:  # noqa: N802
        """The answer to a conversation, at once."""
        return await self._answer("Chat", pb.ChatRequest, message, grpc_context)

    async def ChatStream(self, message: Incoming, grpc_context: Context) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        """The answer to a conversation as it is made."""
        async with aclosing(self._stream("ChatStream", pb.ChatRequest, message, grpc_context)) as responses:
            with Stall() as stall:
                async for response in responses:
                    stall.writing()
                    yield response
                    stall.written()

    async def _answer(self, route: str, kind: type[Request], message: Incoming, grpc_context: Context) -> pb.GenerateResponse:
        record = self._opened(route, grpc_context)
        record.at_once = True
        try:
            with record.errors(), ExitStack() as held:
                request, command = await self._asked(kind, message, record, grpc_context)
                adapter, gathered = self.service.adapter_of(command), Gathered()
                async for batch in self.service.generate(command, record, held, adapter=adapter):
                    gathered.add(batch)
                _remarked(command.remarks, record, grpc_context)
                responses = Responses(request.response, self.service.fingerprint(adapter), record.request_id)
                return await responses.whole(gathered.answers())
        except Exception as error:
            refuse(error, record.request_id, grpc_context)
            return pb.GenerateResponse()

    async def _stream(
        self, route: str, kind: type[Request], message: Incoming, grpc_context: Context
    ) -> AsyncGenerator[pb.GenerateResponse]:
        record = self._opened(route, grpc_context)
        try:
            with record.errors():
                request, command = await self._asked(kind, message, record, grpc_context)
                adapter = self.service.adapter_of(command)
                responses = Responses(request.response, self.service.fingerprint(adapter), record.request_id)
                async with aclosing(self.service.generate(command, record, adapter=adapter)) as batches:
                    async for chunks in batches:
                        _remarked(command.remarks, record, grpc_context)
                        yield await responses.of(chunks)
        except Exception as error:
            refuse(error, record.request_id, grpc_context)

    async def Tokenize(self, message: Incoming, grpc_context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Text to token ids."""
        try:
            caller = await self._charged(grpc_context)
            ask = await read(await received(message), pb.TokenizeRequest, caller)
            self.service.check_model(ask.model)
            special = ask.add_special_tokens if ask.HasField("add_special_tokens") else True
            at_most("text", ask.text, self._most_characters, "characters")
            tokens = await self.service.tokenize(ask.text, add_special_tokens=special, caller=caller)
            response = pb.TokenizeResponse(max_model_len=self.service.engine.info.max_model_len)
            for start in range(0, len(tokens), IDS):
                if start:
                    await yield_to_loop()
                response.token_ids.extend(tokens[start : start + IDS])
            return response
        except Exception as error:
            refuse(error, "", grpc_context)
            return pb.TokenizeResponse()

    async def Detokenize(self, message: Incoming, grpc_context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Token ids to text."""
        try:
            caller = await self._charged(grpc_context)
            ask = await read(await received(message), pb.DetokenizeRequest, caller)
            self.service.check_model(ask.model)
            at_most("token_ids", ask.token_ids, self._most_characters // 2, "ids")
            return pb.DetokenizeResponse(text=await self.service.detokenize(ask.token_ids, "token_ids", caller))
        except Exception as error:
            refuse(error, "", grpc_context)
            return pb.DetokenizeResponse()

    async def Explain(self, message: Incoming, grpc_context: Context) -> pb.ExplainResponse:  # noqa: N802
        """Whom each token of a text attends to, how sure the model is of the next, and what each layer would say."""
        record = self._opened("Explain", grpc_context)
        try:
            with record.errors(), ExitStack() as held:
                explaining = explainable(self.explaining)
                caller = await self._charged(grpc_context, record)
                data = await received(message)
                request = await read(data, pb.ExplainRequest, caller)
                if REQUEST_ID.fullmatch(request.request_id):
                    _named(record, request.request_id, grpc_context)
                explain.check_sizes(request)
                body = await made(data, partial(messages.explain, request), caller)
                command = replace(to_explanation(body, record.request_id), caller=caller)
                return await explain.to_response(await explaining.explain(command, record, held), explaining)
        except Exception as error:
            refuse(error, record.request_id, grpc_context)
            return pb.ExplainResponse()

    async def Embed(self, message: Incoming, grpc_context: Context) -> pb.EmbedResponse:  # noqa: N802
        """Each text as a vector of length 1."""
        record = self._opened("Embed", grpc_context)
        try:
            with record.errors(), ExitStack() as held:
                caller = await self._charged(grpc_context, record)
                data = await received(message)
                request = await read(data, pb.EmbedRequest, caller)
                if REQUEST_ID.fullmatch(request.request_id):
                    _named(record, request.request_id, grpc_context)
                embed.check_sizes(request, self.service.engine.info)
                body = await made(data, partial(messages.embed, request), caller)
                command = command_of(self.service, **to_embedding(body, record.request_id)).by(caller)
                adapter = self.service.adapter_of(command)
                embedded = await embed_texts(self.service, command, body.dimensions, record, held, adapter=adapter)
                return await embed.to_response(embedded, self.service.fingerprint(adapter))
        except Exception as error:
            refuse(error, record.request_id, grpc_context)
            return pb.EmbedResponse()

    async def GetServerInfo(self, message: Incoming, grpc_context: Context) -> pb.GetServerInfoResponse:  # noqa: N802
        """The model, the limits, and the load of the replica that answers."""
        try:
            self._known(NOBODY, grpc_context)
        except Exception as error:
            refuse(error, "", grpc_context)
            return pb.GetServerInfoResponse()
        info, stats = self.service.engine.info, self.service.engine.stats()
        return pb.GetServerInfoResponse(
            version=version("attend-server"),
            model=self.service.model_name,
            system_fingerprint=info.fingerprint,
            max_model_len=info.max_model_len,
            max_batch_requests=info.max_batch_requests,
            max_queued_requests=info.max_queued_requests,
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            num_free_blocks=stats.num_free_blocks,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            adapters=self.service.adapters,
        )

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> health_pb2.HealthCheckResponse:
        """Health of the replica that answers; NOT_FOUND for a service that is not here."""
        if request.service not in SERVICES:
            grpc_context.set_code(StatusCode.NOT_FOUND)
            grpc_context.set_details(f"service {describe(request.service)} is not known")
        return health_pb2.HealthCheckResponse(status=self._health())

    async def List(self, request: health_pb2.HealthListRequest) -> health_pb2.HealthListResponse:  # noqa: N802
        """Health of each service of the replica that answers."""
        now = health_pb2.HealthCheckResponse(status=self._health())
        return health_pb2.HealthListResponse(statuses=dict.fromkeys(SERVICES, now))

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, grpc_context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Health at once and at each change; ends when draining has begun. A service that is not here is unknown until then."""
        if self._num_watches >= MAX_WATCHES:
            grpc_context.set_code(StatusCode.RESOURCE_EXHAUSTED)
            grpc_context.set_details(f"{MAX_WATCHES} health watches are open already")
            return
        told, draining = None, False
        self._num_watches += 1
        try:
            while not draining:
                draining = self.is_draining()
                unknown = request.service not in SERVICES
                now = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN if unknown else self._health()
                if now != told:
                    told = now
                    yield health_pb2.HealthCheckResponse(status=now)
                if not draining:
                    await asyncio.sleep(WATCH_SECONDS)
        finally:
            self._num_watches -= 1

    @property
    def _most_characters(self) -> int:
        return bytes_for(self.service.engine.info.max_model_len, MAX_CHARACTERS)

    def _opened(self, route: str, context: Context) -> RequestRecord:
        """A call's record, under the id in its metadata, or a new one: the message has not been read."""
        record = self.metrics.open("grpc", route, "", context.invocation_metadata, self._caller(context))
        given = (value for name, value in context.invocation_metadata() if name == "x-request-id")
        _named(record, next((name for name in given if REQUEST_ID.fullmatch(name)), None) or secrets.token_hex(16), context)
        return record

    async def _asked(
        self, kind: type[Request], message: Incoming, record: RequestRecord, context: Context
    ) -> tuple[Request, Command]:
        """The request and its command, after the check of the API key. A plain id in the message becomes the call's.

        The command of a long message is made beside the event loop, as the message is read.
        """
        caller = await self._charged(context, record)
        data = await received(message)
        request = await read(data, kind, caller)
        if REQUEST_ID.fullmatch(request.request_id):
            _named(record, request.request_id, context)
        command = await made(data, partial(self._command, request, record.request_id), caller)
        return request, command.by(caller)

    def _command(self, request: Request, request_id: str) -> Command:
        check_sizes(request, self.service.engine.info)
        if isinstance(request, pb.ChatRequest) and self.template is None:
            raise NoChatTemplate(f"{self.service.model_name} has no chat template: use Generate, or --chat-template")
        remarks = Remarks(clamps=clamps(self.beyond_context, by_default=isinstance(request, pb.ChatRequest)))
        body = messages.generation(request)
        return to_command(body, request_id, self.service.defaults, self.template, self.form, remarks)

    def _caller(self, context: Context) -> Caller:
        """Who calls, but for the key."""
        return self.callers.of(context.invocation_metadata(), address_of(context.peer()))

    def _known(self, caller: Caller, context: Context) -> Caller:
        """The caller with its key. Serve has no interceptors, so every method asks for it."""
        return caller if self.keys is None else replace(caller, key=self.keys.among(context.invocation_metadata()))

    async def _charged(self, context: Context, record: RequestRecord | None = None) -> Caller:
        """The caller of a call that has work to do, charged for the call before its message is read."""
        await yield_to_loop()
        caller = self._known(self._caller(context) if record is None else record.caller, context)
        if record is not None:
            record.caller = caller
            if self.is_draining():
                raise Unavailable(SHUTTING_DOWN)
        if caller.key is not None:
            caller.key.arrive()
        return caller

    def _health(self) -> int:
        kind = health_pb2.HealthCheckResponse
        return int(kind.NOT_SERVING if self.is_draining() else kind.SERVING)


async def received(message: Incoming) -> bytes:
    """The bytes of a message."""
    return message if isinstance(message, bytes) else await message()


async def made(message: bytes, make: Callable[[], T], caller: Caller) -> T:
    """What `make` makes of a message; of a large one beside the event loop."""
    return make() if len(message) <= INLINE_BYTES else await alone(make, caller.turn)


async def read(message: bytes, kind: type[M], caller: Caller = NOBODY) -> M:
    """The message in these bytes; a large one is read beside the event loop. Raises InvalidRequest."""
    try:
        return await made(message, partial(kind.FromString, message), caller)
    except DecodeError as error:
        raise InvalidRequest(f"the bytes sent are not a valid {kind.DESCRIPTOR.name}") from error


def address_of(peer: str) -> str:
    """The address in gRPC's name of a peer: 10.0.0.1 of `ipv4:10.0.0.1:50000`, ::1 of `ipv6:%5B::1%5D:50000`."""
    kind, _, place = unquote(peer).partition(":")
    return place.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer


def _named(record: RequestRecord, request_id: str, context: Context) -> None:
    """Give a call its id, which goes back as metadata."""
    record.request_id = request_id
    context.set_trailing_metadata([("x-request-id", request_id)])


def _remarked(remarks: Remarks, record: RequestRecord, context: Context) -> None:
    """Send back what the answer says of its call."""
    if remarks.clamped:
        context.set_trailing_metadata([("x-request-id", record.request_id), *remarks.headers().items()])


def refuse(error: Exception, request_id: str, context: Context) -> None:
    """Set the status of a call that failed. Raising would lose the code in a stream, and show a Python exception."""
    row, beside = wire(error), advice(error)
    if row is INTERNAL:
        log.error("request %s failed", request_id, exc_info=error)
    if beside:
        own = [("x-request-id", request_id)] if request_id else []
        context.set_trailing_metadata([*own, *beside.items()])
    context.set_code(row.grpc)
    context.set_details(sentence(error, request_id))
