"""Nothing that a client sees changes unseen: each exchange is compared with the transcript that is kept of it."""

import re

import pytest

from tests.fakes import FakeEngine, says
from tests.wire import record
from tests.wire.cases import HTTP, complete
from tests.wire.exchange import MASKS, Http
from tests.wire.record import EXCHANGES, GOLDEN, difference
from tests.wire.rpc_cases import RPC


def test_every_exchange_reads_as_its_transcript():
    if told := [each for name in EXCHANGES if (each := difference(GOLDEN / name, EXCHANGES[name].transcript()))]:
        pytest.fail("\n".join(told), pytrace=False)


def test_every_transcript_belongs_to_one_exchange():
    kept = {str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*.txt")}
    assert kept == EXCHANGES.keys()
    assert len(EXCHANGES) == len(HTTP) + len(RPC)


@pytest.mark.parametrize("name", ["http/stream-usage.txt", "grpc/stream.txt"])
def test_a_changed_byte_is_shown_as_a_diff_with_a_way_to_accept_it(name):
    kept = (GOLDEN / name).read_text(encoding="utf-8")
    at = kept.index("seed", kept.index("-" * 40))
    told = difference(GOLDEN / name, kept[:at] + "sead" + kept[at + 4 :])
    lines = told.splitlines()
    assert lines[:2] == [f"--- golden/{name}", "+++ what the server says now"]
    assert [line[:1] for line in lines if "sead" in line] == ["+"]
    assert lines[-1] == record.HOW_TO_ACCEPT


def test_a_line_end_is_a_difference():
    name = "http/stream.txt"
    kept = (GOLDEN / name).read_text(encoding="utf-8")
    assert difference(GOLDEN / name, kept.replace("\n\ndata: [DONE]", "\r\n\r\ndata: [DONE]"))
    assert difference(GOLDEN / name, kept[:-1])
    assert not difference(GOLDEN / name, kept)


def test_what_an_engine_says_otherwise_shows_in_the_transcript():
    case = complete("any", return_token_ids=True)
    other = complete("any", return_token_ids=True, engine=lambda: FakeEngine(says("xyz")))
    assert case.transcript() != other.transcript()
    assert case.transcript() == case.transcript()


def test_a_seed_is_masked_only_where_the_server_drew_it():
    assert '"seed": <drawn>' in Http("drawn", {"prompt": "a"}).transcript()
    assert '"seed": 7' in Http("given", {"prompt": "a", "seed": 7}).transcript()


def test_every_mask_is_used_and_nothing_is_masked_that_the_caller_sent():
    kept = [path.read_text(encoding="utf-8").split("-" * 40) for path in GOLDEN.rglob("*.txt")]
    for shown in [*MASKS.values(), r"\1<drawn>"]:
        placeholder = re.search("<[a-z ]+>", shown)[0]
        assert any(placeholder in response for _, response in kept)
        assert not any(placeholder in request for request, _ in kept)
    assert not any(re.search(pattern, response, re.MULTILINE) for _, response in kept for pattern in list(MASKS)[:2])
