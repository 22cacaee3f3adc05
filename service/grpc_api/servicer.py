"""The gRPC service: a base class of the deployment, whose methods Ray Serve calls by name."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from attend.model.errors import NoChatTemplate, Unavailable
from attend.model.text.chat import ChatTemplate
from attend.service.access.caller import Caller, Callers
from attend.service.access.keys import KEY_HEADERS, KeyRing
from attend.service.chat.forms import TEXT_ALONE, AnswerFormat
from attend.service.contract import messages
from attend.service.contract.commands import to_command, to_embedding, to_explanation
from attend.service.errors import SHUTTING_DOWN
from attend.service.generation.cooperative import yield_to_loop
from attend.service.generation.embed import command_of
from attend.service.generation.embed import compute_embeddings as embed_texts
from attend.service.generation.explain import ExplainService, explainable
from attend.service.generation.generation import GenerationService
from attend.service.generation.slow_reader import SlowReaderGuard
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.grpc_api import embed, explain
from attend.service.grpc_api.convert import Request, Responses, check_sizes
from attend.service.grpc_api.health import HealthMethods
from attend.service.grpc_api.reading import (
    Context,
    Incoming,
    address_of,
    convert_message,
    count_bytes,
    parse_message,
    set_error_status,
)
from attend.service.grpc_api.utility_methods import UtilityMethods
from attend.service.merging import MergedAnswers
from attend.service.observe.metrics import Metrics, RequestRecord
from attend.service.records import REQUEST_ID, Arrival, Command, ExplainCommand
from attend.service.remarks import Beyond, Remarks, clamps
from attend.v1 import generation_pb2 as pb

M = TypeVar("M", bound=Message)
C = TypeVar("C", Command, ExplainCommand)


class GrpcMethods(UtilityMethods, HealthMethods):
    """attend.v1.GenerationService and grpc.health.v1.Health. The deployment sets the attributes."""

    service: GenerationService
    metrics: Metrics
    explaining: ExplainService | None = None
    template: ChatTemplate | None = None
    form: AnswerFormat = TEXT_ALONE
    keys: KeyRing | None = None
    callers: Callers = Callers()
    beyond_context: Beyond = ""
    unread_bodies: UnreadBodies
    """The bodies that are not read yet; HTTP's are among them."""

    async def Generate(self, message: Incoming, grpc_context: Context) -> pb.GenerateResponse:  # noqa: N802 - the proto's name
        """The whole answer at once."""
        return await self._answer("Generate", pb.GenerateRequest, message, grpc_context)

    async def GenerateStream(  # noqa: N802
        self, message: Incoming, grpc_context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """The answer as it is made; each message holds what came together."""
        async with aclosing(self._stream("GenerateStream", pb.GenerateRequest, message, grpc_context)) as responses:
            with SlowReaderGuard() as reader_guard:
                async for response in responses:
                    reader_guard.writing()
                    yield response
                    reader_guard.write_ended()

    async def Chat(self, message: Incoming, grpc_context: Context) -> pb.GenerateResponse:  # noqa: N802
        """The answer to a conversation, at once."""
        return await self._answer("Chat", pb.ChatRequest, message, grpc_context)

    async def ChatStream(self, message: Incoming, grpc_context: Context) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        """The answer to a conversation as it is made."""
        async with aclosing(self._stream("ChatStream", pb.ChatRequest, message, grpc_context)) as responses:
            with SlowReaderGuard() as reader_guard:
                async for response in responses:
                    reader_guard.writing()
                    yield response
                    reader_guard.write_ended()

    async def _answer(self, route: str, kind: type[Request], message: Incoming, grpc_context: Context) -> pb.GenerateResponse:
        record = self._open_record(route, grpc_context)
        record.at_once = True
        try:
            with record.errors(), ExitStack() as places:
                request, command = await self._read_request(kind, message, record, grpc_context, self._command)
                adapter, gathered = self.service.adapter_of(command), MergedAnswers()
                async for batch in self.service.generate(command, record, places, adapter=adapter):
                    gathered.add(batch)
                _send_remarks(command.remarks, record, grpc_context)
                responses = Responses(request.response, self.service.fingerprint(adapter), record.request_id)
                return await responses.full_response(gathered.answers())
        except Exception as error:
            set_error_status(error, record.request_id, grpc_context)
            return pb.GenerateResponse()

    async def _stream(
        self, route: str, kind: type[Request], message: Incoming, grpc_context: Context
    ) -> AsyncGenerator[pb.GenerateResponse]:
        record = self._open_record(route, grpc_context)
        try:
            with record.errors():
                request, command = await self._read_request(kind, message, record, grpc_context, self._command)
                adapter = self.service.adapter_of(command)
                responses = Responses(request.response, self.service.fingerprint(adapter), record.request_id)
                async with aclosing(self.service.generate(command, record, adapter=adapter)) as batches:
                    async for chunks in batches:
                        _send_remarks(command.remarks, record, grpc_context)
                        yield await responses.of(chunks)
        except Exception as error:
            set_error_status(error, record.request_id, grpc_context)

    async def Explain(self, message: Incoming, grpc_context: Context) -> pb.ExplainResponse:  # noqa: N802
        """Attention weights of a text, log probabilities of its tokens, and the logit lens of each layer."""
        record = self._open_record("Explain", grpc_context)
        try:
            with record.errors(), ExitStack() as places:
                explaining = explainable(self.explaining)

                def make(request: pb.ExplainRequest, request_id: str) -> ExplainCommand:
                    explain.check_sizes(request)
                    return to_explanation(messages.to_explain_request(request), request_id)

                _, command = await self._read_request(pb.ExplainRequest, message, record, grpc_context, make)
                return await explain.to_response(await explaining.explain(command, record, places), explaining)
        except Exception as error:
            set_error_status(error, record.request_id, grpc_context)
            return pb.ExplainResponse()

    async def Embed(self, message: Incoming, grpc_context: Context) -> pb.EmbedResponse:  # noqa: N802
        """Each text as a vector of length 1."""
        record = self._open_record("Embed", grpc_context)
        try:
            with record.errors(), ExitStack() as places:
                dimensions: int | None = None

                def make(request: pb.EmbedRequest, request_id: str) -> Command:
                    nonlocal dimensions
                    embed.check_sizes(request, self.service.engine.info)
                    body = messages.to_embed_request(request)
                    dimensions = body.dimensions
                    return command_of(self.service, **to_embedding(body, request_id))

                _, command = await self._read_request(pb.EmbedRequest, message, record, grpc_context, make)
                adapter = self.service.adapter_of(command)
                embedded = await embed_texts(self.service, command, dimensions, record, places, adapter=adapter)
                return await embed.to_response(embedded, self.service.fingerprint(adapter))
        except Exception as error:
            set_error_status(error, record.request_id, grpc_context)
            return pb.EmbedResponse()

    def _open_record(self, route: str, context: Context) -> RequestRecord:
        """A call's record, under the id in its metadata, or a new one: the message has not been read."""
        record = self.metrics.open("grpc", route, "", context.invocation_metadata, self._caller(context))
        given = (value for name, value in context.invocation_metadata() if name == "x-request-id")
        _set_request_id(
            record, next((name for name in given if REQUEST_ID.fullmatch(name)), None) or secrets.token_hex(16), context
        )
        return record

    async def _read_request(
        self,
        kind: type[M],
        message: Incoming,
        record: RequestRecord,
        context: Context,
        make: Callable[[M, str], C],
    ) -> tuple[M, C]:
        """The request and its command, after the check of the API key. A plain id in the message becomes the call's.

        The command of a long message is made in a thread pool, as the message is read.
        """
        caller, arrival = await self._charge(context, record)
        async with count_bytes(message, arrival, self.unread_bodies) as (data, arrival):
            request: Any = await parse_message(data, kind, arrival)
            if REQUEST_ID.fullmatch(request.request_id):
                _set_request_id(record, request.request_id, context)
            deadline = self.service.deadline_of(arrival, max(0, request.deadline_ms) or None)
            command = await convert_message(data, partial(make, request, record.request_id), arrival, deadline)
        return request, replace(command.by(caller), arrival=arrival)

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

    def _with_key(self, caller: Caller, context: Context) -> Caller:
        """The caller with its key. Serve has no interceptors, so every method asks for it."""
        if self.keys is None:
            return caller
        on_unknown = partial(self.metrics.failures.add_beside, "grpc")
        return replace(caller, key=self.keys.among(context.invocation_metadata(), on_unknown))

    def turn_of(self, context: Context) -> str | None:
        """In whose turn a call is read. Raises Unauthenticated."""
        caller = self._caller(context)
        return (caller if self.keys is None else replace(caller, key=self.keys.among(context.invocation_metadata()))).turn

    async def _charge(
        self, context: Context, record: RequestRecord, *, answers: int = 1, while_draining: bool = False
    ) -> tuple[Caller, Arrival]:
        """The caller of a call, charged for it before its message is read, and how the call came."""
        sent = (value for name, value in context.invocation_metadata() if name in KEY_HEADERS)
        await yield_to_loop((record.caller.address, *sent))
        caller = record.caller = self._with_key(record.caller, context)
        if self.is_draining() and not while_draining:
            raise Unavailable(SHUTTING_DOWN)
        if caller.key is not None:
            caller.key.arrive(answers)
        return caller, Arrival(caller.turn, asyncio.get_running_loop().time())


def _set_request_id(record: RequestRecord, request_id: str, context: Context) -> None:
    """Give a call its id, which goes back as metadata."""
    record.request_id = request_id
    context.set_trailing_metadata([("x-request-id", request_id)])


def _send_remarks(remarks: Remarks, record: RequestRecord, context: Context) -> None:
    """Send back what the answer says of its call."""
    if remarks.is_clamped:
        context.set_trailing_metadata([("x-request-id", record.request_id), *remarks.headers().items()])
