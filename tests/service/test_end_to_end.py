"""What a caller and an operator see of a real server: Ray Serve, the fast data plane, the default model."""

import concurrent.futures
import http.client
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import grpc
import openai
import pytest

from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc
from tests.service.server import Server, wait_for

pytestmark = pytest.mark.ray

PROMPT = "def fibonacci(n):"
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0.7, "seed": 1}


def post(server: Server, **body: object) -> Iterator[bytes]:
    """The lines of the answer to POST /v1/completions."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        yield from answer


def complete(server: Server, prompt: str, **fields: object) -> str:
    """The text of a greedy answer."""
    (line,) = post(server, prompt=prompt, temperature=0, **fields)
    return json.loads(line)["choices"][0]["text"]


def stub(server: Server) -> rpc.GenerationServiceStub:
    return rpc.GenerationServiceStub(grpc.insecure_channel(server.target))


def idle(server: Server) -> bool:
    """True if no request runs or waits and every KV block is free."""
    names = ("attend_requests_running", "attend_requests_waiting", "attend_kv_cache_usage")
    return all(server.metric(name) == 0 for name in names)


def test_both_transports_give_the_same_greedy_text(server: Server) -> None:
    streamed = "".join(
        json.loads(line[6:])["choices"][0]["text"]
        for line in post(server, prompt=PROMPT, temperature=0, max_tokens=24, stream=True)
        if line.startswith(b"data: {")
    )
    request = pb.GenerateRequest(text=PROMPT, temperature=0, max_tokens=24)
    whole = stub(server).Generate(request, timeout=60).outputs[0].text
    pieces = [output.text for message in stub(server).GenerateStream(request, timeout=60) for output in message.outputs]
    assert complete(server, PROMPT, max_tokens=24) == streamed == whole == "".join(pieces)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
    },
]


def is_obedient(name: str, arguments: str) -> bool:
    """True if a call is of one of the tools, with arguments that its schema allows."""
    read = json.loads(arguments)
    return name == "now" or (name == "weather" and read["city"] in ("Paris", "Oslo") and 1 <= read["days"] <= 7)


def test_an_agents_loop_of_enforced_calls_goes_on(server: Server) -> None:
    """The default model is no agent: a grammar makes it call, whatever it means."""
    messages: list = [{"role": "user", "content": "What is the weather in Paris?"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for turn in range(4):
            asked = {"model": "attend-default", "messages": messages, "tools": TOOLS, "seed": turn, "max_tokens": 200}
            answer = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
            choice = answer.choices[0]
            calls = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls"
            assert calls
            assert all(is_obedient(call.function.name, call.function.arguments) for call in calls)
            messages.append(choice.message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
        last = client.chat.completions.create(model="attend-default", messages=messages, tools=TOOLS, max_tokens=8)
    assert last.choices[0].finish_reason in ("stop", "length")


def test_calls_over_grpc_are_those_over_http(server: Server) -> None:
    tools = [pb.Tool(name=t["function"]["name"], parameters=json.dumps(t["function"]["parameters"])) for t in TOOLS]
    request = pb.ChatRequest(request_id="same", tools=tools, tool_choice="required", sampling={"seed": 5})
    request.parallel_tool_calls, request.max_tokens = False, 200
    request.messages.add(role="user", content="What is the weather in Oslo?")
    whole = stub(server).Chat(request, timeout=60).outputs[0]
    streamed: dict[int, str] = {}
    for output in (output for message in stub(server).ChatStream(request, timeout=60) for output in message.outputs):
        for call in output.tool_calls:
            streamed[call.index] = streamed.get(call.index, "") + call.id + call.name + call.arguments
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        message = {"role": "user", "content": "What is the weather in Oslo?"}
        same = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 5, "max_tokens": 200}
        same |= {"extra_body": {"request_id": "same"}}
        answer = client.chat.completions.create(model="attend-default", messages=[message], **same).choices[0].message
    assert whole.finish_info.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert all(is_obedient(call.name, call.arguments) for call in whole.tool_calls)
    assert list(streamed.values()) == [call.id + call.name + call.arguments for call in whole.tool_calls]
    assert list(streamed.values()) == [call.id + call.function.name + call.function.arguments for call in answer.tool_calls]


def test_the_openai_client_completes_and_streams(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=24, temperature=0)
        stream = client.completions.create(
            model=model, prompt=PROMPT, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        with pytest.raises(openai.NotFoundError, match="nobody"):
            client.completions.create(model="nobody", prompt=PROMPT)
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


def test_prompts_sent_together_get_the_text_they_get_apart(server: Server) -> None:
    prompts = [PROMPT, "import os\n\nclass Path:\n", "for key, value in", "    def __init__(self"]
    apart = [complete(server, prompt, max_tokens=48) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: complete(server, prompt, max_tokens=48), prompts))
    assert apart == together


def test_a_client_that_leaves_over_http_frees_its_blocks(server: Server) -> None:
    aborted = {"transport": "http", "outcome": "abort"}
    before = server.metric("attend_requests_total", **aborted)
    lines = post(server, prompt=PROMPT, stream=True, **LONG)
    next(lines)
    assert server.metric("attend_kv_cache_usage") > 0
    lines.close()
    assert wait_for(lambda: idle(server), 5)
    assert wait_for(lambda: server.metric("attend_requests_total", **aborted) == before + 1, 5)


def test_a_client_that_leaves_before_a_whole_answer_frees_its_blocks(server: Server) -> None:
    place = urlsplit(server.url)
    body = json.dumps({"prompt": [PROMPT] * 16, "n": 8, **LONG})
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert wait_for(lambda: server.metric("attend_kv_cache_usage") > 0, 10)
    connection.close()
    assert wait_for(lambda: idle(server), 5)


def test_a_client_that_leaves_over_grpc_frees_its_blocks(server: Server) -> None:
    aborted = {"transport": "grpc", "route": "GenerateStream", "outcome": "abort"}
    before = server.metric("attend_requests_total", **aborted)
    request = pb.GenerateRequest(text=PROMPT, max_tokens=900, stopping=pb.StoppingCriteria(ignore_eos=True))
    call = stub(server).GenerateStream(request, timeout=60)
    next(call)
    assert server.metric("attend_kv_cache_usage") > 0
    call.cancel()
    assert wait_for(lambda: idle(server), 5)
    assert wait_for(lambda: server.metric("attend_requests_total", **aborted) == before + 1, 5)


def test_counters_equal_what_clients_received_over_two_replicas(pair: Server) -> None:
    def one(number: int) -> int:
        lines = post(pair, prompt=PROMPT, stream=True, max_tokens=8 + number, ignore_eos=True, seed=number)
        return sum(
            1 for line in lines if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"] is not None
        )

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(24)))
    assert len(pair.replicas()) == 2
    assert pair.metric("attend_scrape_replicas_answered") == pair.metric("attend_scrape_replicas_expected") == 2
    assert pair.metric("attend_generation_tokens_total") == sum(8 + number for number in range(24))
    assert pair.metric("attend_requests_total", outcome="length") == 24
    assert pair.metric("attend_prompt_tokens_total") == 24 * server_prompt_tokens(pair)


def server_prompt_tokens(server: Server) -> int:
    (line,) = post(server, prompt=PROMPT, max_tokens=1, temperature=0)
    return json.loads(line)["usage"]["prompt_tokens"]


def test_two_servers_never_answer_each_others_calls(server: Server, pair: Server) -> None:
    for one, name in ((server, "attend-default"), (pair, "second")):
        for _ in range(20):
            assert json.loads(one.get("/v1/models")[1])["data"][0]["id"] == name
            stub(one).Generate(pb.GenerateRequest(text="x", max_tokens=1, model=name), timeout=30)


def attend(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "attend.service.commands.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
