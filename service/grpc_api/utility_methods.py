"""RPCs that generate nothing: Tokenize, Detokenize, GetServerInfo."""

from importlib.metadata import version

from attend.model.params import at_most
from attend.service.access.caller import Caller
from attend.service.generation.cooperative import yield_to_loop
from attend.service.generation.generation import GenerationService
from attend.service.generation.unread_bodies import UnreadBodies
from attend.service.grpc_api.reading import Context, Incoming, count_bytes, parse_message, set_error_status
from attend.service.observe.metrics import RequestRecord
from attend.service.records import Arrival, bytes_for
from attend.v1 import generation_pb2 as pb

MAX_CHARACTERS = 1 << 20
"""Characters to be made token ids in one call, and half as many token ids to be made text, where the model's context needs no
more: as many as a body of HTTP can hold."""
IDS = 1 << 14
"""Token ids that are written together: less than a millisecond of work."""


class UtilityMethods:
    """A part of `GrpcMethods`, which has what they need."""

    service: GenerationService
    unread_bodies: UnreadBodies

    def _open_record(self, route: str, context: Context) -> RequestRecord:
        raise NotImplementedError

    async def _charge(
        self, context: Context, record: RequestRecord, *, answers: int = 1, while_draining: bool = False
    ) -> tuple[Caller, Arrival]:
        raise NotImplementedError

    async def Tokenize(self, message: Incoming, grpc_context: Context) -> pb.TokenizeResponse:  # noqa: N802 - the proto's name
        """RPC: a text as token ids."""
        record = self._open_record("Tokenize", grpc_context)
        try:
            with record.errors():
                caller, arrival = await self._charge(grpc_context, record, while_draining=True)
                async with count_bytes(message, arrival, self.unread_bodies) as (data, arrival):
                    ask = await parse_message(data, pb.TokenizeRequest, arrival)
                self.service.check_model(ask.model)
                special = ask.add_special_tokens if ask.HasField("add_special_tokens") else True
                at_most("text", ask.text, self._most_characters, "characters")
                tokens = await self.service.tokenize(ask.text, add_special_tokens=special, caller=caller, arrival=arrival)
                response = pb.TokenizeResponse(max_model_len=self.service.engine.info.max_model_len)
                for start in range(0, len(tokens), IDS):
                    if start:
                        await yield_to_loop()
                    response.token_ids.extend(tokens[start : start + IDS])
            record.count_finished()
            return response
        except Exception as error:
            set_error_status(error, record.request_id, grpc_context)
            return pb.TokenizeResponse()

    async def Detokenize(self, message: Incoming, grpc_context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """RPC: token ids as a text."""
        record = self._open_record("Detokenize", grpc_context)
        try:
            with record.errors():
                caller, arrival = await self._charge(grpc_context, record, while_draining=True)
                async with count_bytes(message, arrival, self.unread_bodies) as (data, arrival):
                    ask = await parse_message(data, pb.DetokenizeRequest, arrival)
                self.service.check_model(ask.model)
                at_most("token_ids", ask.token_ids, self._most_characters // 2, "ids")
                text = await self.service.detokenize(ask.token_ids, "token_ids", caller, arrival)
            record.count_finished()
            return pb.DetokenizeResponse(text=text)
        except Exception as error:
            set_error_status(error, record.request_id, grpc_context)
            return pb.DetokenizeResponse()

    async def GetServerInfo(self, message: Incoming, grpc_context: Context) -> pb.GetServerInfoResponse:  # noqa: N802
        """The model, the limits, and the load of the replica that answers."""
        record = self._open_record("GetServerInfo", grpc_context)
        try:
            with record.errors():
                await self._charge(grpc_context, record, answers=0, while_draining=True)
        except Exception as error:
            set_error_status(error, record.request_id, grpc_context)
            return pb.GetServerInfoResponse()
        record.count_finished()
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

    @property
    def _most_characters(self) -> int:
        return bytes_for(self.service.engine.info.max_model_len, MAX_CHARACTERS)
