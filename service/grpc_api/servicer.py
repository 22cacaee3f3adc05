"""The gRPC service: a base class of the deployment, whose methods Ray Serve calls by name."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

from google.protobuf.message import Message

from attend.model.errors import NoChatTemplate, Unavailable
from attend.model.params import at_most
from attend.model.text.chat import ChatTemplate
from attend.service.access.caller import Caller, Callers
from attend.service.access.keys import KEY_HEADERS, KeyRing
from attend.service.chat.forms import TEXT_ALONE, AnswerFormat
from attend.service.contract import messages
from attend.service.contract.commands import to_command, to_embedding, to_explanation
from attend.service.errors import SHUTTING_DOWN
from attend.service.generation.cooperative import yield_to_loop
from attend.service.generation.embed import command_of, compute_embeddings
from attend.service.generation.explain import ExplainService, explainable
from attend.service.generation.generation import GenerationService
from attend.service.generation.slow_reader import SlowReaderGuard
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.grpc_api.convert import (
    Request,
    Responses,
    check_embed_sizes,
    check_explain_sizes,
    check_sizes,
    embed_response,
    explain_response,
)
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
from attend.service.merging import MergedAnswers
from attend.service.observe.metrics import Metrics, RequestRecord
from attend.service.records import REQUEST_ID, Arrival, Command, ExplainCommand, bytes_for
from attend.service.remarks import MaxTokensPolicy, Remarks, clamps
from attend.v1 import generation_pb2 as pb

M = TypeVar("M", bound=Message)
C = TypeVar("C", Command, ExplainCommand)
MAX_CHARACTERS = 1 << 20
"""Characters to be made token ids in one call, and half as many token ids to be made text, where the model's context needs no
more: as many as a body of HTTP can hold."""
INFO = ("max_model_len", "max_batch_requests", "max_queued_requests", "block_size", "num_blocks")
"""What GetServerInfo tells of the engine."""
IDS = 1 << 14
"""Token ids that are written together: less than a millisecond of work."""


class GrpcMethods(HealthMethods):
    """attend.v1.GenerationService and grpc.health.v1.Health. The deployment sets the attributes."""

    service: GenerationService
    metrics: Metrics
    explaining: ExplainService | None = None
    template: ChatTemplate | None = None
    form: AnswerFormat = TEXT_ALONE
    keys: KeyRing | None = None
    callers: Callers = Callers()
    beyond_context: MaxTokensPolicy = ""
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
            async for response in responses:
                yield response

    async def Chat(self, message: Incoming, grpc_context: Context) -> pb.GenerateResponse:  # noqa: N802
        """The answer to a conversation, at once."""
        return await self._answer("Chat", pb.ChatRequest, message, grpc_context)

    async def ChatStream(self, message: Incoming, grpc_context: Context) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        """The answer to a conversation as it is made."""
        async with aclosing(self._stream("ChatStream", pb.ChatRequest, message, grpc_context)) as responses:
            async for response in responses:
                yield response

    async def _answer(self, route: str, kind: type[Request], message: Incoming, context: Context) -> pb.GenerateResponse:
        async with self._call_record(route, context) as record:
            record.at_once = True
            with ExitStack() as places:
                request, command = await self._read_request(kind, message, record, context, self._command)
                adapter, gathered = self.service.adapter_of(command), MergedAnswers()
                async for batch in self.service.generate(command, record, places, adapter=adapter):
                    gathered.add(batch)
                _send_remarks(command.remarks, record, context)
                responses = Responses(request.response, self.service.fingerprint(adapter), record.request_id)
                return await responses.full_response(gathered.answers())
        return pb.GenerateResponse()

    async def _stream(
        self, route: str, kind: type[Request], message: Incoming, context: Context
    ) -> AsyncGenerator[pb.GenerateResponse]:
        async with self._call_record(route, context) as record:
            request, command = await self._read_request(kind, message, record, context, self._command)
            adapter = self.service.adapter_of(command)
            responses = Responses(request.response, self.service.fingerprint(adapter), record.request_id)
            with SlowReaderGuard() as reader_guard:
                async with aclosing(self.service.generate(command, record, adapter=adapter)) as batches:
                    async for chunks in batches:
                        _send_remarks(command.remarks, record, context)
                        response = await responses.of(chunks)
                        reader_guard.writing()
                        yield response
                        reader_guard.write_ended()

    async def Explain(self, message: Incoming, grpc_context: Context) -> pb.ExplainResponse:  # noqa: N802
        """Attention weights of a text, log probabilities of its tokens, and the logit lens of each layer."""
        async with self._call_record("Explain", grpc_context) as record:
            explaining = explainable(self.explaining)

            def make(request: pb.ExplainRequest, **origin: Any) -> ExplainCommand:
                check_explain_sizes(request)
                return to_explanation(messages.to_explain_request(request), **origin)

            with ExitStack() as places:
                _, command = await self._read_request(pb.ExplainRequest, message, record, grpc_context, make)
                return await explain_response(await explaining.explain(command, record, places), explaining)
        return pb.ExplainResponse()

    async def Embed(self, message: Incoming, grpc_context: Context) -> pb.EmbedResponse:  # noqa: N802
        """Each text as a vector of length 1."""
        async with self._call_record("Embed", grpc_context) as record:

            def make(request: pb.EmbedRequest, **origin: Any) -> Command:
                check_embed_sizes(request, self.service.engine.info)
                return command_of(self.service, **to_embedding(messages.to_embed_request(request), **origin))

            with ExitStack() as places:
                request, command = await self._read_request(pb.EmbedRequest, message, record, grpc_context, make)
                adapter, dimensions = self.service.adapter_of(command), messages.to_embed_request(request).dimensions
                embedded = await compute_embeddings(self.service, command, dimensions, record, places, adapter=adapter)
                return await embed_response(embedded, self.service.fingerprint(adapter))
        return pb.EmbedResponse()

    async def _read_text(
        self, kind: type[M], message: Incoming, record: RequestRecord, context: Context
    ) -> tuple[M, Caller, Arrival]:
        """The message of a call for tokens or text, its caller, and how it came."""
        caller, arrival = await self._charge(context, record, while_draining=True)
        async with count_bytes(message, arrival, self.unread_bodies) as (data, arrival):
            request: Any = await parse_message(data, kind, arrival)
        self.service.check_model(request.model)
        return request, caller, arrival

    async def Tokenize(self, message: Incoming, grpc_context: Context) -> pb.TokenizeResponse:  # noqa: N802 - the proto's name
        """RPC: a text as token ids."""
        response = pb.TokenizeResponse()
        async with self._call_record("Tokenize", grpc_context) as record:
            ask, caller, arrival = await self._read_text(pb.TokenizeRequest, message, record, grpc_context)
            special = ask.add_special_tokens if ask.HasField("add_special_tokens") else True
            at_most("text", ask.text, self._most_characters, "characters")
            tokens = await self.service.tokenize(ask.text, add_special_tokens=special, caller=caller, arrival=arrival)
            response.max_model_len = self.service.engine.info.max_model_len
            for start in range(0, len(tokens), IDS):
                if start:
                    await yield_to_loop()
                response.token_ids.extend(tokens[start : start + IDS])
            record.count_finished()
        return response

    async def Detokenize(self, message: Incoming, grpc_context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """RPC: token ids as a text."""
        response = pb.DetokenizeResponse()
        async with self._call_record("Detokenize", grpc_context) as record:
            ask, caller, arrival = await self._read_text(pb.DetokenizeRequest, message, record, grpc_context)
            at_most("token_ids", ask.token_ids, self._most_characters // 2, "ids")
            response.text = await self.service.detokenize(ask.token_ids, "token_ids", caller, arrival)
            record.count_finished()
        return response

    async def GetServerInfo(self, message: Incoming, grpc_context: Context) -> pb.GetServerInfoResponse:  # noqa: N802
        """The model, the limits, and the load of the replica that answers."""
        async with self._call_record("GetServerInfo", grpc_context) as record:
            await self._charge(grpc_context, record, answers=0, while_draining=True)
            record.count_finished()
            info, stats = self.service.engine.info, self.service.engine.stats()
            return pb.GetServerInfoResponse(
                version=version("attend-server"),
                model=self.service.model_name,
                system_fingerprint=info.fingerprint,
                adapters=self.service.adapters,
                **{name: getattr(info, name) for name in INFO},
                **{name: getattr(stats, name) for name in ("num_free_blocks", "num_running", "num_waiting")},
            )
        return pb.GetServerInfoResponse()

    @property
    def _most_characters(self) -> int:
        return bytes_for(self.service.engine.info.max_model_len, MAX_CHARACTERS)

    @asynccontextmanager
    async def _call_record(self, route: str, context: Context) -> AsyncIterator[RequestRecord]:
        """A call's record until it has ended. What goes wrong becomes the status of the call."""
        record = self._open_record(route, context)
        try:
            with record.errors():
                yield record
        except Exception as error:
            set_error_status(error, record.request_id, context)

    def _open_record(self, route: str, context: Context) -> RequestRecord:
        """A call's record, under the id in its metadata, or a new one: the message has not been read."""
        caller = self.callers.of(context.invocation_metadata(), address_of(context.peer()))
        record = self.metrics.open("grpc", route, "", context.invocation_metadata, caller)
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
        make: Callable[..., C],
    ) -> tuple[M, C]:
        """The request and its command, after the check of the API key. A long message is read in a thread pool."""
        caller, arrival = await self._charge(context, record)
        async with count_bytes(message, arrival, self.unread_bodies) as (data, arrival):
            request: Any = await parse_message(data, kind, arrival)
            if REQUEST_ID.fullmatch(request.request_id):
                _set_request_id(record, request.request_id, context)
            deadline = self.service.deadline_of(arrival, max(0, request.deadline_ms) or None)
            origin = {"request_id": record.request_id, "caller": caller, "arrival": arrival}
            command = await convert_message(data, partial(make, request, **origin), arrival, deadline)
        return request, command

    def _command(self, request: Request, **origin: Any) -> Command:
        check_sizes(request, self.service.engine.info)
        if isinstance(request, pb.ChatRequest) and self.template is None:
            raise NoChatTemplate(f"{self.service.model_name} has no chat template: use Generate, or --chat-template")
        remarks = Remarks(clamps=clamps(self.beyond_context, by_default=isinstance(request, pb.ChatRequest)))
        body = messages.generation(request)
        defaults, template, form = self.service.defaults, self.template, self.form
        return to_command(body, defaults=defaults, template=template, form=form, remarks=remarks, **origin)

    def turn_of(self, context: Context) -> str | None:
        """In whose turn a call is read. Raises Unauthenticated."""
        caller = self.callers.of(context.invocation_metadata(), address_of(context.peer()))
        return (caller if self.keys is None else replace(caller, key=self.keys.among(context.invocation_metadata()))).turn

    async def _charge(
        self, context: Context, record: RequestRecord, *, answers: int = 1, while_draining: bool = False
    ) -> tuple[Caller, Arrival]:
        """The caller of a call, charged for it before its message is read, and how the call came."""
        sent = (value for name, value in context.invocation_metadata() if name in KEY_HEADERS)
        await yield_to_loop((record.caller.address, *sent))
        caller = record.caller
        if self.keys is not None:  # Serve has no interceptors, so every method asks for the key
            on_unknown = partial(self.metrics.failures.add_beside, "grpc")
            caller = record.caller = replace(caller, key=self.keys.among(context.invocation_metadata(), on_unknown))
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
