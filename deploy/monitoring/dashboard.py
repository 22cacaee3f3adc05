"""Writes dashboard.json: `python deploy/monitoring/dashboard.py`. Grafana imports the file; a test holds the two together.

The data source and the chosen models and replicas are variables, so the file names nothing of one installation.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Panel = dict[str, Any]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
MODEL = 'model=~"$model"'
CHOSEN = 'model=~"$model", replica=~"$replica"'
WIDTH, HEIGHT = 24, 8


def panel(title: str, unit: str, queries: dict[str, str], *, kind: str = "timeseries", width: int = 8, text: str = "") -> Panel:
    """One panel; `queries` are expressions by the legend of what they give, `width` is in 24ths of the page."""
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expr, "legendFormat": legend, "range": True}
        for i, (legend, expr) in enumerate(queries.items())
    ]
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {},
        "gridPos": {"w": width, "h": HEIGHT if kind == "timeseries" else HEIGHT // 2},
        "targets": targets,
    }


def total(name: str, by: str = "", labels: str = CHOSEN) -> str:
    """The rate of a counter, summed."""
    return (
        f"sum by ({by}) (rate({name}{{{labels}}}[$__rate_interval]))"
        if by
        else f"sum(rate({name}{{{labels}}}[$__rate_interval]))"
    )


def quantiles(name: str, by: str = "") -> dict[str, str]:
    """Median, 95th and 99th percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    prefix = f"{{{{{by}}}}} " if by else ""
    return {
        f"{prefix}p{share * 100:g}": f"histogram_quantile({share}, {total(f'{name}_bucket', labels)})"
        for share in (0.5, 0.95, 0.99)
    }


def mean(name: str, by: str = "replica") -> str:
    """What a histogram's observations were on average."""
    return f"{total(f'{name}_sum', by)} / {total(f'{name}_count', by)}"


def overview() -> Iterator[Panel]:
    """Is it up, and how much does it do."""
    for title, unit, expr in (
        ("Replicas that answer", "none", 'sum(attend_scrape_replicas_answered{job="attend"})'),
        ("Replicas", "none", 'sum(attend_scrape_replicas_expected{job="attend"})'),
        ("Running", "none", f"sum(attend_requests_running{{{CHOSEN}}})"),
        ("Waiting", "none", f"sum(attend_requests_waiting{{{CHOSEN}}})"),
        ("Calls", "reqps", total("attend_requests_total")),
        ("Tokens generated", "none", total("attend_generation_tokens_total")),
    ):
        yield panel(title, unit, {"": expr}, kind="stat", width=4)
    yield panel("Calls by outcome", "reqps", {"{{outcome}}": total("attend_requests_total", "outcome")})
    tokens = {"prompt": total("attend_prompt_tokens_total"), "answer": total("attend_generation_tokens_total")}
    yield panel("Throughput, tokens a second", "none", tokens)
    late = {
        "errors": f"model:attend_calls_failed:ratio_rate5m{{{MODEL}}}",
        "late first tokens": f"model:attend_first_token_late:ratio_rate5m{{{MODEL}}}",
        "late next tokens": f"model:attend_next_token_late:ratio_rate5m{{{MODEL}}}",
        "refused": f"model:attend_calls_rejected:ratio_rate5m{{{MODEL}}}",
    }
    yield panel("Share that violates an objective", "percentunit", late, text="Needs the recording rules of rules.yaml.")
    yield panel("Rejected, by reason", "reqps", {"{{reason}}": total("attend_requests_rejected_total", "reason")})
    preparing = {"{{replica}}": f"attend_requests_preparing{{{CHOSEN}}}"}
    yield panel("Requests in preparation (tokenized, validated)", "none", preparing)
    states = {"{{state}}": "max by (state) (attend_replicas)", "died": "max(attend_replica_deaths_total)"}
    yield panel("Replicas", "none", states, text="As Serve's controller reports them; died: total since the cluster started.")
    failures = {"{{transport}}": total("attend_auth_failures_total", "transport")}
    yield panel("Requests without a known API key", "reqps", failures)
    good = {"": f"min(attend_api_keys_file_ok{{{CHOSEN}}})"}
    yield panel("Key file", "none", good, kind="stat", width=4, text="1: valid. Only with API keys.")


def edge() -> Iterator[Panel]:
    """HAProxy, which callers connect to; nothing with --single."""
    held = {"{{transport}} on {{node}}": "attend_edge_connections"}
    yield panel("Connections", "none", held | {"limit, {{transport}} on {{node}}": "attend_edge_connections_limit"})
    routes = {"{{node}}": "attend_edge_ok"}
    yield panel("Routes to every replica", "none", routes, kind="stat", text="0 while replicas change.", width=4)
    ends = {"{{node}}": "attend_tls_certificate_expiry_timestamp_seconds - time()"}
    yield panel("Certificate expires in", "s", ends, kind="stat", width=4, text="Only with TLS.")
    good = {"{{node}}": "attend_tls_reload_ok"}
    yield panel("Certificate files", "none", good, kind="stat", width=4, text="0: they cannot be used. Only with TLS.")


def latency() -> Iterator[Panel]:
    """What callers wait for."""
    for title, name in (
        ("Time to first token", "attend_time_to_first_token_seconds"),
        ("Inter-token latency", "attend_inter_token_latency_seconds"),
        ("Time per output token", "attend_time_per_output_token_seconds"),
        ("End-to-end latency", "attend_request_duration_seconds"),
        ("Queue time", "attend_request_queue_seconds"),
        ("Prefill", "attend_request_prefill_seconds"),
        ("Decode", "attend_request_decode_seconds"),
    ):
        yield panel(title, "s", quantiles(name))
    yield panel("Prompt tokens of a request", "none", quantiles("attend_request_prompt_tokens"))
    yield panel("Generated tokens of an answer", "none", quantiles("attend_request_generation_tokens"))


def engine() -> Iterator[Panel]:
    """What the replicas do."""
    yield panel("Running", "none", {"{{replica}}": f"attend_requests_running{{{CHOSEN}}}"})
    yield panel("Waiting", "none", {"{{replica}}": f"attend_requests_waiting{{{CHOSEN}}}"})
    yield panel("Batch size of a step", "none", {"{{replica}}": mean("attend_step_batch_size")})
    yield panel("Step duration", "s", quantiles("attend_step_seconds"))
    heartbeat = {"{{replica}}": f"attend_engine_heartbeat_seconds{{{CHOSEN}}}"}
    yield panel(
        "Seconds since the step thread last made progress",
        "s",
        heartbeat,
        text="Liveness: from 10 s on Serve replaces the replica; an alert after a minute.",
    )
    memory = {"{{replica}}": f"attend_memory_used_bytes{{{CHOSEN}}}"}
    memory |= {"limit, {{replica}}": f"attend_memory_limit_bytes{{{CHOSEN}}}"}
    yield panel("Memory of the container", "bytes", memory, text="Page cache is not counted: the kernel gives it up.")
    slower = {"{{replica}}: {{reason}}": f"attend_slower_path_info{{{CHOSEN}}}"}
    yield panel(
        "Slower path", "none", slower, kind="stat", text="1 where a backend serves that is slower than the machine's fastest."
    )


def cache() -> Iterator[Panel]:
    """The KV cache."""
    yield panel("KV cache usage", "percentunit", {"{{replica}}": f"attend_kv_cache_usage{{{CHOSEN}}}"})
    yield panel("Preemptions a second", "none", {"{{replica}}": total("attend_preemptions_total", "replica")})
    hits, asked = (total(f"attend_prefix_cache_{what}_total", "replica") for what in ("hits", "queries"))
    yield panel("Prefix cache hit rate", "percentunit", {"{{replica}}": f"{hits} / {asked}"})
    disk = {"read back": "read_bytes", "written": "written_bytes"}
    moved = {title: total(f"attend_kv_disk_{name}_total") for title, name in disk.items()}
    yield panel("KV offloading", "Bps", moved, text="Only with kv_disk_folder.")
    right, guessed = (total(f"attend_draft_tokens{what}_total", "replica") for what in ("_accepted", ""))
    yield panel("Speculative decoding: acceptance rate of draft tokens", "percentunit", {"{{replica}}": f"{right} / {guessed}"})
    yield panel("KV cache in memory", "bytes", {"{{replica}}": f"attend_kv_cache_resident_bytes{{{CHOSEN}}}"})


def place_panels(rows: dict[str, Iterator[Panel]]) -> list[Panel]:
    """The panels below their rows' titles, from left to right, with ids."""
    panels: list[Panel] = []
    y = 0
    for title, row in rows.items():
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})
        x, y, height = 0, y + 1, 0
        for one in row:
            place = one["gridPos"]
            if x + place["w"] > WIDTH:
                x, y, height = 0, y + height, 0
            place |= {"x": x, "y": y}
            x, height = x + place["w"], max(height, place["h"])
            panels.append(one)
        y += height
    return [{"id": number, **one} for number, one in enumerate(panels, 1)]


def choice(name: str, query: str) -> dict[str, Any]:
    """A variable whose values Prometheus knows; all of them at first."""
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def batches() -> Iterator[Panel]:
    """Files and batches."""
    shared = f"max by (status) (attend_batch_batches{{{CHOSEN}}})"
    yield panel("Batches by status", "none", {"{{status}}": shared}, text="Only with batch_folder.")
    yield panel("Lines of batches a second", "none", {"{{outcome}}": total("attend_batch_lines_total", "outcome")})
    oldest = {"seconds": f"max(attend_batch_oldest_waiting_seconds{{{CHOSEN}}})"}
    yield panel("Age of the oldest batch that waits", "s", oldest)
    errors = {"{{replica}}": total("attend_batch_storage_errors_total", "replica")}
    yield panel("Failures of the folder of batches a second", "none", errors)


def dashboard() -> dict[str, Any]:
    """The whole document."""
    variables: Sequence[dict[str, Any]] = (
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        choice("model", "label_values(attend_requests_running, model)"),
        choice("replica", f"label_values(attend_requests_running{{{MODEL}}}, replica)"),
    )
    rows = {
        "Overview": overview(),
        "Edge": edge(),
        "Latency": latency(),
        "Engine": engine(),
        "Cache": cache(),
        "Batches": batches(),
    }
    return {
        "uid": "attend",
        "title": "Attend",
        "tags": ["attend"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(variables)},
        "panels": place_panels(rows),
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("dashboard.json").write_text(text(), encoding="utf-8")
