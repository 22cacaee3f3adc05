"""The Serve configurations on two Ray nodes, and what SIGTERM to a node does to its streams."""

import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc
from tests.deploy.check import EXIT_SECONDS
from tests.deploy.manifests import ROOT
from tests.deploy.ray_nodes import NODE_DRAIN, cluster
from tests.service.server import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.cluster, pytest.mark.timeout(400)]
CONFIGURATIONS = ["deploy/serve/attend.yaml", "deploy/serve/autoscaling.yaml"]
READ_BY_ALERTS = {"ray_serve_application_status", "ray_serve_deployment_status", "ray_serve_num_http_requests_total"}
"""And ray_serve_num_http_error_requests_total, which is there after the first error."""
TOKENS = 900
LONGEST = 12
"""Seconds; in production it is 600."""
PROMPT = "def fibonacci(n):"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("ray")) as started:
        yield started


def deploy(nodes, path):
    """Deploy a file with its ports moved, and with a drain that a test can wait for. Returns when both replicas run."""
    config = yaml.safe_load((ROOT / path).read_text())
    config["http_options"] |= {"host": "127.0.0.1", "port": nodes.http}
    config["grpc_options"]["port"] = nodes.grpc
    [application] = config["applications"]
    application["args"] |= {"request_timeout_seconds": LONGEST, "drain_seconds": LONGEST}
    file = nodes.folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    nodes.deploy(file)
    running = wait_for(lambda: nodes.application().get("status") == "RUNNING" and nodes.replicas() == 2, 180)
    assert running, nodes.application()


def answers(url):
    """True if a GET is answered with 200. A node's HAProxy may come up after the replicas."""
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def stream_over_http(url, kept):
    """Keep (time, line) of each event."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        for line in filter(None, answer.iter_lines()):
            kept.append((time.monotonic(), line))


def stream_over_grpc(target, kept):
    """Keep (time, message) of each message."""
    request = pb.GenerateRequest(text=PROMPT, max_tokens=TOKENS, stopping=pb.StoppingCriteria(ignore_eos=True))
    with grpc.insecure_channel(target) as channel:
        for message in rpc.GenerationServiceStub(channel).GenerateStream(request, timeout=60):
            kept.append((time.monotonic(), message))


@pytest.mark.parametrize("path", CONFIGURATIONS)
def test_serve_deploy_of_the_file_answers_on_both_nodes_over_both_transports(nodes, path):
    deploy(nodes, path)
    for http, port in ((nodes.http, nodes.grpc), (nodes.worker_http, nodes.worker_grpc)):
        assert wait_for(lambda url=f"http://127.0.0.1:{http}/readyz": answers(url), 30)
        body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"http://127.0.0.1:{http}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask = pb.GenerateRequest(text=PROMPT, max_tokens=4, stopping=pb.StoppingCriteria(ignore_eos=True))
            whole = rpc.GenerationServiceStub(channel).Generate(ask, timeout=60)
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert whole.outputs[0].num_tokens == 4
        assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_the_metrics_of_rays_that_alerts_read_are_on_the_nodes_pages(nodes):
    """And say that the application runs, as 6, and that no call was lost."""
    if nodes.replicas() != 2:
        deploy(nodes, CONFIGURATIONS[0])

    def samples():
        pages = [httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text for port in nodes.metrics]
        return {
            sample.name: sample for page in pages for each in text_string_to_metric_families(page) for sample in each.samples
        }

    def complete():
        httpx.post(f"http://127.0.0.1:{nodes.http}/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, timeout=60)
        names = samples()
        return READ_BY_ALERTS <= names.keys() and names["ray_serve_application_status"].value == 6

    assert wait_for(complete, 60), READ_BY_ALERTS - samples().keys()
    assert samples()["ray_serve_deployment_status"].value == 6


def test_rays_dashboard_asks_for_the_token(nodes):
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{nodes.dashboard}/api/serve/applications/", timeout=20)


def test_sigterm_to_a_node_lets_its_streams_end_within_the_grace_period(nodes):
    """The node holds every replica, and no other can take them: the worst case. The longest request ends with its deadline."""
    if nodes.replicas() != 2:
        deploy(nodes, CONFIGURATIONS[0])
    url, target = f"http://127.0.0.1:{nodes.worker_http}", f"127.0.0.1:{nodes.worker_grpc}"
    lines, messages = ([], []), ([], [])
    stream_over_http(url, [])  # the first calls wait for connections: others would have ended by then
    stream_over_grpc(target, [])
    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(stream_over_http, url, kept) for kept in lines]
        ends += [pool.submit(stream_over_grpc, target, kept) for kept in messages]
        assert wait_for(lambda: all(lines + messages))  # tokens flow: what is left of the streams outlives the signal
        signalled = time.monotonic()
        nodes.worker.send_signal(signal.SIGTERM)
        for end in ends:
            end.result()
    for stream in lines:
        assert stream[-1][1] == "data: [DONE]", stream[-2:]
        assert stream[0][0] < signalled < stream[-1][0], "the stream did not run when the signal came"
    for stream in messages:
        assert stream[0][0] < signalled < stream[-1][0]
        assert stream[-1][1].outputs[-1].finish_info.finish_reason in (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_DEADLINE)
    assert max(stream[-1][0] for stream in lines + messages) - signalled <= LONGEST + 2
    nodes.worker.wait(NODE_DRAIN + EXIT_SECONDS)
    print(f"streams ended {max(s[-1][0] for s in lines + messages) - signalled:.1f} s after SIGTERM, the node", end=" ")
    print(f"{time.monotonic() - signalled:.1f} s after it")
