"""The metrics page of a server in the Prometheus text format.

Each sample of a replica gets a `replica` label, and the samples of a family stay together.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from prometheus_client.parser import text_string_to_metric_families


def serving(replicas: Iterable[str], proxies: Iterable[str], deaths: int) -> str:
    """Who serves: the state of each replica and of each proxy, and the replicas that ended without being told to."""
    states, statuses = Counter(replicas), Counter(proxies)
    return (
        "# HELP attend_replicas Replicas by their state, as Serve's controller knows them\n# TYPE attend_replicas gauge\n"
        + "".join(f'attend_replicas{{state="{state}"}} {number}\n' for state, number in sorted(states.items()))
        + "# HELP attend_proxies Proxies of the nodes by their status\n# TYPE attend_proxies gauge\n"
        + "".join(f'attend_proxies{{status="{status}"}} {number}\n' for status, number in sorted(statuses.items()))
        + "# HELP attend_replica_deaths_total Replicas that ended without being told to, or did not start\n"
        + f"# TYPE attend_replica_deaths_total counter\nattend_replica_deaths_total {deaths}\n"
    )


def counted(expected: int, answered: int) -> str:
    """How many replicas the page covers."""
    return (
        "# HELP attend_scrape_replicas_expected Replicas that were asked for their metrics\n"
        f"# TYPE attend_scrape_replicas_expected gauge\nattend_scrape_replicas_expected {expected}\n"
        "# HELP attend_scrape_replicas_answered Replicas whose metrics are on this page\n"
        f"# TYPE attend_scrape_replicas_answered gauge\nattend_scrape_replicas_answered {answered}\n"
    )


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
        f"# HELP {name} {_escaped(text)}\n# TYPE {name} {kind}\n" + "".join(samples[name])
        for name, (text, kind) in heads.items()
    )


def _line(name: str, labels: Sequence[tuple[str, str]], value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text).replace(chr(34), chr(92) + chr(34))}"' for key, text in labels)
    return f"{name}{{{inside}}} {value}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
