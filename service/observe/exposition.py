"""The metrics page of a server in the Prometheus text format, each sample with a `replica` label."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families


def serving_metrics(replicas: Iterable[str], deaths: int) -> str:
    """Who serves: the state of each replica, and the replicas that ended without being told to."""
    states = [({"state": state}, number) for state, number in sorted(Counter(replicas).items())]
    known = "Replicas of the whole cluster by their state, as Serve's controller knows them"
    died = "Replicas that died, or did not start; the count outlives them"
    return family("attend_replicas", "gauge", known, states) + family(
        "attend_replica_deaths_total", "counter", died, [({}, deaths)]
    )


def replica_counts(num_expected: int, num_answered: int) -> str:
    """How many replicas the page covers."""
    asked, told = "Replicas that were asked for their metrics", "Replicas whose metrics are on this page"
    return family("attend_scrape_replicas_expected", "gauge", asked, [({}, num_expected)]) + family(
        "attend_scrape_replicas_answered", "gauge", told, [({}, num_answered)]
    )


def family(name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> str:
    """The samples of one metric, (labels, value), under its help and its type."""
    lines = (_line(name, list(labels.items()), value) for labels, value in samples)
    return f"# HELP {name} {_escape_label(text)}\n# TYPE {name} {kind}\n" + "".join(lines)


def merge(pages: Iterable[tuple[str, str]]) -> str:
    """(replica, page) pairs as one page in the Prometheus text format."""
    heads: dict[str, tuple[str, str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, page in sorted(pages):
        for family in text_string_to_metric_families(page):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            heads.setdefault(name, (family.documentation, family.type))
            lines = samples.setdefault(name, [])
            lines += [_line(s.name, [("replica", replica), *s.labels.items()], s.value) for s in family.samples]
    return "".join(
        f"# HELP {name} {_escape_label(text)}\n# TYPE {name} {kind}\n" + "".join(samples[name])
        for name, (text, kind) in heads.items()
    )


def _line(name: str, labels: Sequence[tuple[str, str]], value: float) -> str:
    inside = ",".join(f'{key}="{_escape_label(text).replace(chr(34), chr(92) + chr(34))}"' for key, text in labels)
    return f"{name}{{{inside}}} {value}\n" if labels else f"{name} {value}\n"


def _escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
