"""Rules, alerts and the dashboard: each alert is explained and proved both ways, and all of it works on real scrapes."""

import concurrent.futures
import contextlib
import importlib.util
import json
import re
import runpy
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from attend.model.engine.request import OffloadStats
from attend.service.contract.routes import COUNTED
from attend.service.observe import edge
from attend.service.observe.collectors import BatchNumbers
from attend.service.observe.metrics import OUTCOMES
from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc
from tests.deploy.manifests import ROOT
from tests.deploy.monitoring_prometheus import promtool, scraping, tool
from tests.fakes import FakeEngine, build_server
from tests.service.server import Server, free_port, running, wait_for

FOLDER = ROOT / "deploy/monitoring"
RULES = FOLDER / "rules.yaml"
rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
alerts = {rule["alert"]: rule for rule in rules if "alert" in rule}
records = {rule["record"]: rule["expr"] for rule in rules if "record" in rule}
scenarios = yaml.safe_load((FOLDER / "tests.yaml").read_text())["tests"]
dashboard = json.loads((FOLDER / "dashboard.json").read_text())
panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
queries = {f"{panel['title']}: {one['legendFormat']}": one["expr"] for panel in panels for one in panel["targets"]}
each_alert = pytest.mark.parametrize("name", alerts)

PAGE_ONLY = {
    *("attend_scrape_replicas_expected", "attend_scrape_replicas_answered"),
    *("attend_replicas", "attend_replica_deaths_total"),
    *(name for name in edge.ABOUT if "tls" not in name),
}
"""What the merged page adds to the replicas' own."""
KEYS = {"attend_api_keys_file_ok"}
OF_SEVERAL_MODELS = {
    *("attend_model_load_failures_total", "attend_model_deaths_total"),
    "attend_models_memory_budget_bytes",
}
DCGM = "DCGM_FI_DEV_"
"""Metrics of dcgm-exporter, which is there where GPUs are."""
SOMETIMES = {*KEYS, *OF_SEVERAL_MODELS, *(name for name in edge.ABOUT if "tls" in name), "attend_requests_rejected_total"}
"""What a page has only with some settings, or some versions of the service."""


def page() -> str:
    """A replica's page, with KV offloading."""
    engine = FakeEngine()
    engine.offload = OffloadStats(0, 0, 0, 0, 0, 0, 0)
    server = build_server(engine)
    server.metrics.has_batches(BatchNumbers)
    return server.metrics.text()


def series() -> set[str]:
    """Every name under which Prometheus stores a sample of ours."""
    found = text_string_to_metric_families(page())
    return {sample.name for family in found for sample in family.samples} | PAGE_ONLY


def names(expression: str) -> set[str]:
    """The metrics in an expression, recorded ones included."""
    return set(re.findall(r"(?<![\w:])(?:model:)?attend_[\w:]+", expression))


def bounds(family: str) -> set[str]:
    found = text_string_to_metric_families(page())
    return {sample.labels["le"] for one in found for sample in one.samples if sample.name == f"{family}_bucket"}


def substituted(expression: str) -> str:
    """A panel's query as Grafana sends it while all models and replicas are chosen."""
    for name, value in (("$__rate_interval", "1m"), ("$model", ".*"), ("$replica", ".*")):
        expression = expression.replace(name, value)
    return expression


def firing(scenario: dict) -> set[str]:
    """The alerts that fire at some moment of a scenario."""
    labels = [sample["labels"] for test in scenario["promql_expr_test"] for sample in test["exp_samples"]]
    return {re.search('alertname="(\\w+)"', one)[1] for one in labels}


@each_alert
def test_an_alert_leads_to_its_own_paragraph(name):
    page, _, anchor = alerts[name]["annotations"]["runbook_url"].partition("#")
    assert page == "https://attend.example.com/deploy/monitoring/README.md", "one page, which an overlay moves"
    sections = re.split(r"^### ", (FOLDER / "README.md").read_text(), flags=re.MULTILINE)
    [paragraph] = [text for text in sections if text.startswith(f"{name}\n")]
    assert anchor == name.lower()
    assert len(paragraph.partition("\n\n## ")[0].split()) > 20


def test_no_paragraph_explains_an_alert_that_is_gone():
    text = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"^### (\w+)$", text, flags=re.MULTILINE)) == alerts.keys()


@each_alert
def test_an_alert_is_proved_to_fire_to_stay_silent_and_to_say_what_it_should(name):
    fires = [scenario for scenario in scenarios if name in firing(scenario)]
    assert fires, "no scenario in which it fires"
    assert any(
        all(name not in sample["labels"] for sample in test["exp_samples"])
        for scenario in fires
        for test in scenario["promql_expr_test"]
    ), "no moment of such a scenario at which it does not"
    told = [test for scenario in scenarios for test in scenario.get("alert_rule_test", ()) if test["alertname"] == name]
    assert [one["exp_labels"]["severity"] for test in told for one in test["exp_alerts"]] == [
        alerts[name]["labels"]["severity"]
    ]


def test_every_metric_that_a_rule_or_a_panel_names_exists():
    used = {name for text in (*(rule["expr"] for rule in rules), *queries.values()) for name in names(text)}
    assert used - records.keys() <= series() | SOMETIMES
    assert {name for name in used if name.startswith("model:")} <= records.keys()
    assert len(used) > 30


def test_every_metric_of_rays_that_a_rule_names_is_written_by_ray():
    source = (Path(importlib.util.find_spec("ray").origin).parent / "serve/_private/application_state.py").read_text()
    used = {name for rule in rules for name in re.findall(r"\bray_(\w+)", rule["expr"]) if name != "io_cluster"}
    assert used == {"serve_application_status"} and '"serve_application_status"' in source
    assert "1=DEPLOY_FAILED, 2=UNHEALTHY, 3=NOT_STARTED" in source, "the numbers in the rules"


def test_a_rule_compares_with_a_bound_that_its_histogram_has():
    compared = [re.findall(r'(attend_\w+)_bucket\{le="([\d.]+)"\}', expr) for expr in records.values()]
    pairs = {pair for found in compared for pair in found}
    assert {family for family, _ in pairs} == {"attend_time_to_first_token_seconds", "attend_inter_token_latency_seconds"}
    assert all(bound in bounds(family) for family, bound in pairs)


def test_rules_and_panels_ask_for_outcomes_and_transports_that_exist():
    texts = [*(rule["expr"] for rule in rules), *queries.values()]
    assert {found for text in texts for found in re.findall(r'outcome="(\w+)"', text)} <= set(OUTCOMES)
    assert {found for text in texts for found in re.findall(r'transport="(\w+)"', text)} <= set(COUNTED)


def test_the_dashboard_is_what_its_script_writes():
    written = runpy.run_path(str(FOLDER / "dashboard.py"))["text"]()
    assert written == (FOLDER / "dashboard.json").read_text()


def test_panels_have_their_own_ids_and_places():
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken = set()
    for place in (panel["gridPos"] for panel in dashboard["panels"]):
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_promtool_finds_no_fault_in_the_rules():
    answer = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES)
    assert answer.returncode == 0, answer.stdout


def test_promtool_finds_no_fault_in_the_panels_queries(tmp_path):
    made = [{"record": f"panel:{number}:x", "expr": substituted(expr)} for number, expr in enumerate(queries.values())]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": made}]}))
    answer = promtool("check", "rules", tmp_path / "panels.yaml")
    assert answer.returncode == 0, answer.stdout


def test_the_right_alerts_fire_and_only_those():
    answer = promtool("test", "rules", FOLDER / "tests.yaml")
    assert answer.returncode == 0, answer.stdout


def test_without_its_patience_every_alert_would_fire_where_it_must_not(tmp_path):
    """The scenarios hold each `for`: with all of them gone, each such alert appears at a moment that expects silence."""
    changed = re.sub(r"^    for: .*\n", "", RULES.read_text(), flags=re.MULTILINE)
    (tmp_path / "rules.yaml").write_text(changed)
    (tmp_path / "tests.yaml").write_text((FOLDER / "tests.yaml").read_text())
    answer = promtool("test", "rules", tmp_path / "tests.yaml")
    early = set()
    for wanted, got in re.findall(r"exp: (.*)\n\s*got: (.*)", answer.stdout):
        early |= set(re.findall('alertname="(\\w+)"', got)) - set(re.findall('alertname="(\\w+)"', wanted))
    assert early == {name for name, rule in alerts.items() if "for" in rule}


def http_calls(server: Server, end: float) -> int:
    """Stream completions until `end`, on both routes; one in ten is refused."""
    count = 0
    bodies = {
        "/v1/completions": {"prompt": "def add(a, b):\n" * 8},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "def add(a, b):"}]},
    }
    while time.monotonic() < end:
        path, body = list(bodies.items())[count % 2]
        wanted = {"max_tokens": 24, "stream": True, "temperature": 0, **({"n": 99} if count % 10 == 9 else {})}
        request = urllib.request.Request(
            server.url + path, json.dumps(body | wanted).encode(), {"Content-Type": "application/json"}
        )
        with (
            contextlib.suppress(urllib.error.HTTPError),
            urllib.request.urlopen(request, timeout=60) as answer,
        ):
            answer.read()
        count += 1
    return count


def grpc_calls(server: Server, end: float) -> int:
    """Generate and stream until `end`; one in ten leaves in the middle."""
    count = 0
    with grpc.insecure_channel(server.target) as channel:
        stub = rpc.GenerationServiceStub(channel)
        while time.monotonic() < end:
            call = stub.GenerateStream(pb.GenerateRequest(text="import os\n" * 20, max_tokens=24), timeout=60)
            with contextlib.suppress(grpc.RpcError):
                for place, _ in enumerate(call):
                    if count % 10 == 9 and place == 2:
                        call.cancel()
            stub.Generate(pb.GenerateRequest(text="class A:\n", max_tokens=8), timeout=60)
            count += 2
    return count


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A Prometheus that has watched a server of two replicas, with batches, under load for a while, and watches on."""
    tmp = tmp_path_factory.mktemp("prometheus")
    tool("prometheus")  # before the server, which takes its time
    flags = (
        "--dtype",
        "float32",
        "--draft-tokens",
        "4",
        "--replicas",
        "2",
        "--num-threads",
        "1",
        "--kv-cache-memory",
        "200000000",
        "--kv-disk-folder",
        str(tmp / "kv"),
        "--batch-folder",
        str(tmp / "batches"),
    )
    with (
        running(tmp / "server", *flags) as server,
        scraping(f"127.0.0.1:{server.http}", RULES, tmp, free_port()) as prometheus,
    ):
        assert wait_for(lambda: prometheus.query("attend_requests_running"), 30)
        end = time.monotonic() + 12
        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            calls = [pool.submit(http_calls, server, end) for _ in range(2)]
            calls += [pool.submit(grpc_calls, server, end) for _ in range(2)]
            counts = [call.result(60) for call in calls]
        time.sleep(3)  # two more scrapes, and an evaluation of the rules after them
        yield server, prometheus, counts


@pytest.mark.ray
@pytest.mark.timeout(240)
class TestRealScrapes:
    """What Prometheus makes of a server under load."""

    def test_each_metric_of_the_contract_has_a_series_for_each_replica(self, watched):
        server, prometheus, _ = watched
        replicas = server.replicas()
        assert len(replicas) == 2
        for name in sorted(series() - PAGE_ONLY):
            assert {one["metric"]["replica"] for one in prometheus.query(name)} == replicas, name
        for name in PAGE_ONLY:
            assert all("replica" not in one["metric"] for one in prometheus.query(name))
            assert prometheus.query(name), name

    def test_every_panel_gives_numbers(self, watched):
        _, prometheus, _ = watched
        for title, expression in queries.items():
            if names(expression) & SOMETIMES - series() or DCGM in expression:
                continue
            found = prometheus.query(substituted(expression))
            assert found, title
            assert any(one["value"][1] != "NaN" for one in found), title

    def test_every_rule_is_evaluated_and_every_recorded_series_is_there(self, watched):
        _, prometheus, _ = watched
        state = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        assert {rule["name"]: rule["lastError"] for rule in state if rule["health"] != "ok"} == {}
        assert len(state) == len(rules)
        for name in records:
            [one] = prometheus.query(name)
            assert one["metric"]["model"] == "attend-default", name
            assert float(one["value"][1]) >= 0, name

    def test_the_left_side_of_every_alert_has_something_to_compare(self, watched):
        """What an alert compares is there, so that its silence means health and not a name that nobody writes."""
        _, prometheus, _ = watched
        for name, rule in alerts.items():
            if (
                name == "AttendAbsent"
                or "ray_serve" in rule["expr"]
                or DCGM in rule["expr"]
                or names(rule["expr"]) & SOMETIMES - series()
            ):
                continue
            side = re.split(r"\s(?:==|!=|>=|<=|>|<)\s", rule["expr"])[0]
            assert prometheus.query(side), f"{name}: {side}"
            prometheus.query(rule["expr"])

    def test_a_working_service_wakes_nobody(self, watched):
        _, prometheus, counts = watched
        assert min(counts) > 0
        assert [one for one in prometheus.get("alerts")["alerts"] if one["state"] == "firing"] == []

    def test_counters_agree_with_what_was_called(self, watched):
        _, prometheus, counts = watched
        [total] = prometheus.query("sum(attend_requests_total)")
        assert float(total["value"][1]) == sum(counts)
