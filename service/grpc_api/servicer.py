"""The gRPC methods, a base class of the deployment: Serve calls them by name, and has no interceptors."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from google.protobuf.message import Message
from grpc import StatusCode
from grpc_health.v1 import health_pb2

from attend.model.errors import NoChatTemplate, Unavailable
from attend.model.params import at_most, describe
from attend.model.text.chat import ChatTemplate
from attend.service.access.keys import KeyRing
from attend.service.access.quota import Key, name_of, turn_of
from attend.service.chat.forms import TEXT_ALONE, AnswerFormat
from attend.service.contract import messages
from attend.service.contract.commands import to_command, to_embedding, to_explanation
from attend.service.contract.routes import SERVICE
from attend.service.errors import SHUTTING_DOWN
from attend.service.gathered import Gathered
from attend.service.generation.embed import command_of
from attend.service.generation.embed import embed as embed_texts
from attend.service.generation.explain import Explaining, explainable
from attend.service.generation.generation import GenerationService
from attend.service.generation.stall import Stall
from attend.service.generation.turns import yield_to_loop
from attend.service.generation.unread import Unread
from attend.service.grpc_api import embed, explain
from attend.service.grpc_api.convert import Request, Responses, check_sizes
from attend.service.grpc_api.limits import MAX_WATCHES
from attend.service.grpc_api.reading import Context, Incoming, address_of, held, made, read, refuse
from attend.service.observe.metrics import Metrics, RequestRecord
from attend.service.records import REQUEST_ID, Arrival, Command, ExplainCommand, bytes_for
from attend.service.remarks import Beyond, Remarks, clamps
from attend.v1 import generation_pb2 as pb

M = TypeVar("M", bound=Message)
C = TypeVar("C", Command, ExplainCommand)
SERVICES = ("", SERVICE)
"""What a health check may ask for: the server, or its one service by name."""
MAX_CHARACTERS = 1 << 20
"""Characters to be made token ids in one call, and half as many token ids to be made text, where the model's context needs no
more: as many as a body of HTTP can hold."""
IDS = 1 << 14
"""Token ids that are written together: less than a millisecond of work."""
WATCH_SECONDS = 0.5
"""How often a health watch looks for a change."""


class GrpcMethods:
    """attend.v1.GenerationService and grpc.health.v1.Health. The deployment sets the attributes."""

    service: GenerationService
    metrics: Metrics
    explaining: Explaining | None = None
    template: ChatTemplate | None = None
    form: AnswerFormat = TEXT_ALONE
    keys: KeyRing | None = None
    beyond_context: Beyond = ""
    unread: Unread
    """The bodies that are not read yet; HTTP's are among them."""
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
            with record.errors(), ExitStack() as places:
                request, command = await self._asked(kind, message, record, grpc_context, self._command)
                adapter, gathered = self.service.adapter_of(command), Gathered()
                async for batch in self.service.generate(command, record, places, adapter=adapter):
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
                request, command = await self._asked(kind, message, record, grpc_context, self._command)
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
            key, arrival = await self._charged(grpc_context)
            async with held(message, arrival, self.unread) as (data, arrival):
                ask = await read(data, pb.TokenizeRequest, arrival)
            self.service.check_model(ask.model)
            special = ask.add_special_tokens if ask.HasField("add_special_tokens") else True
            at_most("text", ask.text, self._most_characters, "characters")
            tokens = await self.service.tokenize(ask.text, add_special_tokens=special, key=key, arrival=arrival)
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
            key, arrival = await self._charged(grpc_context)
            async with held(message, arrival, self.unread) as (data, arrival):
                ask = await read(data, pb.DetokenizeRequest, arrival)
            self.service.check_model(ask.model)
            at_most("token_ids", ask.token_ids, self._most_characters // 2, "ids")
            return pb.DetokenizeResponse(text=await self.service.detokenize(ask.token_ids, "token_ids", key, arrival))
        except Exception as error:
            refuse(error, "", grpc_context)
            return pb.DetokenizeResponse()

    async def Explain(self, message: Incoming, grpc_context: Context) -> pb.ExplainResponse:  # noqa: N802
        """Whom each token of a text attends to, how sure the model is of the next, and what each layer would say."""
        record = self._opened("Explain", grpc_context)
        try:
            with record.errors(), ExitStack() as places:
                explaining = explainable(self.explaining)

                def make(request: pb.ExplainRequest, request_id: str) -> ExplainCommand:
                    explain.check_sizes(request)
                    return to_explanation(messages.explain(request), request_id)

                _, command = await self._asked(pb.ExplainRequest, message, record, grpc_context, make)
                return await explain.to_response(await explaining.explain(command, record, places), explaining)
        except Exception as error:
            refuse(error, record.request_id, grpc_context)
            return pb.ExplainResponse()

    async def Embed(self, message: Incoming, grpc_context: Context) -> pb.EmbedResponse:  # noqa: N802
        """Each text as a vector of length 1."""
        record = self._opened("Embed", grpc_context)
        try:
            with record.errors(), ExitStack() as places:
                dimensions: int | None = None

                def make(request: pb.EmbedRequest, request_id: str) -> Command:
                    nonlocal dimensions
                    embed.check_sizes(request, self.service.engine.info)
                    body = messages.embed(request)
                    dimensions = body.dimensions
                    return command_of(self.service, **to_embedding(body, request_id))

                _, command = await self._asked(pb.EmbedRequest, message, record, grpc_context, make)
                adapter = self.service.adapter_of(command)
                embedded = await embed_texts(self.service, command, dimensions, record, places, adapter=adapter)
                return await embed.to_response(embedded, self.service.fingerprint(adapter))
        except Exception as error:
            refuse(error, record.request_id, grpc_context)
            return pb.EmbedResponse()

    async def GetServerInfo(self, message: Incoming, grpc_context: Context) -> pb.GetServerInfoResponse:  # noqa: N802
        """The model, the limits, and the load of the replica that answers."""
        try:
            self._key(grpc_context)
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
        record = self.metrics.open("grpc", route, "", context.invocation_metadata, address_of(context.peer()))
        given = (value for name, value in context.invocation_metadata() if name == "x-request-id")
        _named(record, next((name for name in given if REQUEST_ID.fullmatch(name)), None) or secrets.token_hex(16), context)
        return record

    async def _asked(
        self,
        kind: type[M],
        message: Incoming,
        record: RequestRecord,
        context: Context,
        make: Callable[[M, str], C],
    ) -> tuple[M, C]:
        """The request and its command, after the check of the API key. A plain id in the message becomes the call's.

        The command of a long message is made beside the event loop, as the message is read.
        """
        key, arrival = await self._charged(context, record)
        async with held(message, arrival, self.unread) as (data, arrival):
            request: Any = await read(data, kind, arrival)
            if REQUEST_ID.fullmatch(request.request_id):
                _named(record, request.request_id, context)
            deadline = self.service.deadline_of(arrival, max(0, request.deadline_ms) or None)
            command = await made(data, partial(make, request, record.request_id), arrival, deadline)
        return request, replace(command, key=key, arrival=arrival)

    def _command(self, request: Request, request_id: str) -> Command:
        check_sizes(request, self.service.engine.info)
        if isinstance(request, pb.ChatRequest) and self.template is None:
            raise NoChatTemplate(f"{self.service.model_name} has no chat template: use Generate, or --chat-template")
        remarks = Remarks(clamps=clamps(self.beyond_context, by_default=isinstance(request, pb.ChatRequest)))
        body = messages.generation(request)
        return to_command(body, request_id, self.service.defaults, self.template, self.form, remarks)

    def _key(self, context: Context) -> Key | None:
        """The caller's key. Serve has no interceptors, so every method asks for it. Raises Unauthenticated."""
        if self.keys is None:
            return None
        given = context.invocation_metadata()
        sent = {wanted: [value for name, value in given if name == wanted] for wanted in ("authorization", "x-api-key")}
        return self.keys.authenticate(*sent["authorization"], x_api_key=sent["x-api-key"])

    def turn_of(self, context: Context) -> str | None:
        """In whose turn a call is read. Raises Unauthenticated."""
        return self._turn(self._key(context), context)

    def _turn(self, key: Key | None, context: Context) -> str | None:
        address, _ = self.metrics.origin(context.invocation_metadata(), address_of(context.peer()))
        return turn_of(key, address)

    async def _charged(self, context: Context, record: RequestRecord | None = None) -> tuple[Key | None, Arrival]:
        """The key of a call that has work to do, charged for the call before its message is read, and how the call came."""
        await yield_to_loop()
        key = self._key(context)
        if record is not None:
            record.key = name_of(key)
            if self.is_draining():
                raise Unavailable(SHUTTING_DOWN)
        if key is not None:
            key.arrive()
        return key, Arrival(self._turn(key, context), asyncio.get_running_loop().time())

    def _health(self) -> int:
        kind = health_pb2.HealthCheckResponse
        return int(kind.NOT_SERVING if self.is_draining() else kind.SERVING)


def _named(record: RequestRecord, request_id: str, context: Context) -> None:
    """Give a call its id, which goes back as metadata."""
    record.request_id = request_id
    context.set_trailing_metadata([("x-request-id", request_id)])


def _remarked(remarks: Remarks, record: RequestRecord, context: Context) -> None:
    """Send back what the answer says of its call."""
    if remarks.clamped:
        context.set_trailing_metadata([("x-request-id", record.request_id), *remarks.headers().items()])
