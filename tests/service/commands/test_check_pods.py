"""`attend check` of an address behind which several pods answer."""

import pytest

from attend.service.commands import check
from attend.service.commands.check import CHECKS
from tests.service.commands.test_check import running


@pytest.mark.parametrize(("met_again", "outcome"), [(True, "ok"), (False, "skipped")])
def test_calls_to_several_pods_are_counted_where_each_pod_is_met_and_never_fail(met_again, outcome):
    """Each page is of another pod; after the calls perhaps of one alone, which got none."""
    with running() as server:
        pages = []

        def one_of_two(status, body):
            pages.append(body)
            other = len(pages) % 2 or not (met_again or len(pages) <= check.PAGES)
            page, name = (pages[0], b"b") if other else (body, b"a")
            return status, page.replace(b"{model=", b'{replica="' + name + b'",model=')

        server.sabotage.http["/metrics"] = one_of_two
        results = server.results()
    assert {name: result.outcome for name, result in results.items()} == dict.fromkeys(CHECKS, "ok") | {
        "API key": "skipped",
        "metrics": outcome,
    }
    assert results["replicas"].detail == "1 of 1 replicas answered, 1 more in other pods"


def test_a_model_says_the_same_whichever_replica_is_asked_and_whenever_it_began():
    said = []
    for _ in range(2):
        with running() as server, (target := server.probe()).client:
            said.append(target.ask("/v1/models"))
    assert said[0] == said[1]
