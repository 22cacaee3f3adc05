"""The same on gRPC, beside which stand the calls that only gRPC has."""

import json
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from attend.model.errors import EngineFailed, Overloaded
from attend.v1 import generation_pb2 as pb
from tests.fakes import END, FakeEngine, seeded
from tests.wire.cases import (
    GOOD_KEY,
    NO_LIMITS,
    ONE_A_MINUTE,
    TOOLS,
    ZONE,
    breaking,
    calling,
    draining,
    refusing,
    speaking,
    stalled,
)
from tests.wire.exchange import MakeEngine, Rpc

SERVICE = "attend.v1.GenerationService"
HEALTH = "grpc.health.v1.Health.Check"
A: dict[str, Any] = {"text": "a", "max_tokens": 3, "sampling": {"seed": 7}}


def generate(name: str, *, engine: MakeEngine = FakeEngine, stream: bool = False, **fields: Any) -> Rpc:
    method = f"{SERVICE}.GenerateStream" if stream else f"{SERVICE}.Generate"
    ids = {} if "token_ids" not in fields else {"text": None}
    return Rpc(name, pb.GenerateRequest(**A | ids | fields), method, engine=engine)


def ask(name: str, message: Message, method: str) -> Rpc:
    return Rpc(name, message, f"{SERVICE}.{method}")


def refused(name: str, message: Message | bytes | None = None, **more: Any) -> Rpc:
    return Rpc(f"error-{name}", pb.GenerateRequest(text="a") if message is None else message, **more)


def seed_and(**sampling: Any) -> dict[str, Any]:
    return {"seed": 7} | sampling


GENERATION = [
    Rpc("defaults", pb.GenerateRequest(text="a")),
    generate("plain"),
    generate("stream", stream=True),
    generate("n-2", sampling=seed_and(n=2), engine=lambda: FakeEngine(seeded)),
    generate("stream-n-2", sampling=seed_and(n=2), engine=lambda: FakeEngine(seeded), stream=True),
    generate("stream-burst", engine=lambda: FakeEngine(burst=2), stream=True, response={"output_token_ids": True}),
    generate("token-ids", token_ids={"ids": [97]}, response={"prompt_token_ids": True, "output_token_ids": True}),
    generate("logprobs", response={"logprobs": True, "top_logprobs": 2}),
    generate(
        "stream-echo-logprobs",
        text="xyz",
        response={"echo": True, "logprobs": True, "top_logprobs": 1, "prompt_logprobs": 1},
        stream=True,
    ),
    generate("max-tokens-0", text="xyz", max_tokens=0, response={"echo": True, "prompt_logprobs": 0}),
    generate("stop-string", max_tokens=16, stopping={"stop_strings": ["de"]}),
    generate("stop-token", max_tokens=16, stopping={"stop_token_ids": [100]}, response={"output_token_ids": True}),
    generate("end-of-text", token_ids={"ids": [253]}, max_tokens=16, response={"output_token_ids": True}),
    generate(
        "ignore-eos",
        token_ids={"ids": [253]},
        stopping={"ignore_eos": True},
        response={"output_token_ids": True, "skip_special_tokens": False},
    ),
    generate("stream-utf-8", engine=speaking("é😀"), max_tokens=16, stream=True, response={"output_token_ids": True}),
    generate("stream-timing", response={"timing": True}, stream=True),
    generate("resume", max_tokens=5, resume_token_ids={"ids": [98, 99]}, response={"output_token_ids": True}),
    generate("stream-deadline", deadline_ms=500, engine=stalled(2), stream=True),
]
HI = {
    "messages": [pb.ChatMessage(role="user", content="Hello")],
    "request_id": "r1",
    "max_tokens": 300,
    "sampling": {"seed": 7},
}
TOOL = pb.Tool(name="now", description="The time.", parameters=json.dumps(ZONE))


def chat(name: str, method: str, **fields: Any) -> Rpc:
    """A chat; one with a tool gets an answer that thinks, speaks and calls it."""
    return Rpc(name, pb.ChatRequest(**HI | fields), f"{SERVICE}.{method}", engine=calling, template=TOOLS)


CHATS = [
    chat("chat", "Chat", tools=[TOOL]),
    chat("chat-stream", "ChatStream", tools=[TOOL], response={"output_token_ids": True}),
    chat("chat-plain", "Chat", max_tokens=12),
    chat("error-chat-message", "Chat", messages=[pb.ChatMessage(role="robot")]),
    chat("error-chat-tool", "Chat", tools=[TOOL, TOOL]),
]
SERVER = [
    ask("explain", pb.ExplainRequest(text="ab", answer_text="c", heads={"numbers": [1]}, top_logprobs=1), "Explain"),
    ask("explain-all", pb.ExplainRequest(token_ids={"ids": [97, 226]}, scores=True, logit_lens=1), "Explain"),
    ask("embed", pb.EmbedRequest(inputs=[{"text": "ab"}, {"token_ids": {"ids": [99]}}], dimensions=2), "Embed"),
    ask("tokenize", pb.TokenizeRequest(text="é!"), "Tokenize"),
    ask("detokenize", pb.DetokenizeRequest(token_ids=[195, 169, 33, END]), "Detokenize"),
    ask("server-info", pb.GetServerInfoRequest(), "GetServerInfo"),
    Rpc("health", health_pb2.HealthCheckRequest(), HEALTH),
    Rpc("health-draining", health_pb2.HealthCheckRequest(), HEALTH, engine=draining),
]
ERRORS = [
    refused("invalid", pb.GenerateRequest(text="a", temperature=3)),
    refused("stop-strings", pb.GenerateRequest(text="a", stopping={"stop_strings": [""]})),
    refused("no-input", pb.GenerateRequest()),
    refused("context", pb.GenerateRequest(text="a", max_tokens=128)),
    refused("embed", pb.EmbedRequest(inputs=[{}]), method=f"{SERVICE}.Embed"),
    refused("malformed", b"\xff\xff\xff"),
    refused("model", pb.GenerateRequest(text="a", model="gpt-4")),
    refused("no-key", limits=NO_LIMITS),
    refused("wrong-key", limits=NO_LIMITS, metadata=(("authorization", "Bearer att_other"),)),
    refused("key-limit", limits=ONE_A_MINUTE, metadata=(("authorization", GOOD_KEY),), times=2),
    refused("queue", engine=refusing(Overloaded("the queue is full", 2))),
    refused("internal", engine=refusing(EngineFailed("SecretError"))),
    refused("draining", engine=draining),
    refused("deadline", pb.GenerateRequest(text="a", deadline_ms=1), engine=stalled(0)),
    generate("error-in-stream", engine=breaking(2), stream=True),
]
RPC = GENERATION + CHATS + SERVER + ERRORS
