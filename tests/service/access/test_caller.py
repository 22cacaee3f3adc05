"""Who makes a call: by a key, else by what a trusted proxy says, else nobody; and nobody can say it of himself."""

import asyncio
import logging

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attend.model.errors import SettingError
from attend.service.access.caller import FORWARDED, Caller, Callers, networks
from attend.service.access.keys import Entry, KeyRing, digest_of, write_keys
from attend.service.access.quota import Key, Limits, Share
from attend.service.http_api import body
from attend.service.settings import read_settings
from attend.v1 import generation_pb2 as pb
from attend.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fakes import FakeEngine, Server, build_server
from tests.service.grpc_api.test_server import serving

TRUSTED = networks("10.0.0.0/8, 127.0.0.1, fd00::/8")
GATEWAY, STRANGER = "10.0.0.9", "198.51.100.7"


def tenant(told: str | list[str], *, peer: str = GATEWAY, header: str = FORWARDED, behind_edge: bool = False) -> str | None:
    lines = [told] if isinstance(told, str) else told
    return Callers(TRUSTED, header, behind_edge=behind_edge).of([(header.lower(), line) for line in lines], peer).tenant


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("203.0.113.5", "203.0.113.5"),
        ("203.0.113.5, 10.1.1.1, 10.0.0.1", "203.0.113.5"),
        ("192.0.2.1, 203.0.113.5", "203.0.113.5"),
        (["192.0.2.1", "203.0.113.5, 10.1.1.1"], "203.0.113.5"),
        ("192.0.2.1,203.0.113.5:8123", "203.0.113.5"),
        ("2001:db8::1", "2001:db8::1"),
        ("[2001:DB8::1]:443", "2001:db8::1"),
        ("::ffff:203.0.113.5", "203.0.113.5"),
        ("::ffff:10.1.2.3", None),
        ("10.1.1.1, 10.0.0.1", None),
        ("", None),
        ("unknown", None),
        ("203.0.113.5, unknown", None),
        ("203.0.113.5,", None),
        ("203.0.113.5, _hidden, 10.0.0.1", None),
        ("fe80::1%a b", None),
        ("203.0.113.5, " + "10.0.0.1, " * 4000 + "10.0.0.1", None),
    ],
)
def test_the_tenant_is_the_last_forwarded_address_that_is_no_trusted_proxys(told, found):
    assert tenant(told) == found


@pytest.mark.parametrize("peer", [STRANGER, "11.0.0.1", "::1", "", "unix:/run/a", "not an address"])
@pytest.mark.parametrize("header", [FORWARDED, "X-Tenant"])
def test_from_an_address_that_is_not_trusted_no_header_names_a_tenant(peer, header):
    assert tenant("203.0.113.5", peer=peer, header=header) is None


@pytest.mark.parametrize("peer", ["10.0.0.9", "127.0.0.1", "fd12::7", "::ffff:10.0.0.9"])
def test_each_way_to_write_a_trusted_address_counts(peer):
    assert tenant("203.0.113.5", peer=peer) == "203.0.113.5"


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("acme", "acme"),
        ("ann@acme.example", "ann@acme.example"),
        ("a" * 128, "a" * 128),
        ("a" * 129, None),
        ("", None),
        ("two words", None),
        ("a\0b", None),
        ("é", None),
        (["acme", "acme"], None),
        ("acme, evil", None),
    ],
)
def test_of_another_header_the_tenant_is_its_one_value(told, found):
    assert tenant(told, header="X-Tenant") == found


@given(st.text(), st.lists(st.text()))
def test_whatever_a_stranger_writes_he_has_no_tenant_and_no_name_ends_a_salt(own, lines):
    assert tenant(lines, peer=STRANGER) is None
    for header in (FORWARDED, "x-tenant"):
        assert "\0" not in (tenant([*lines, own], header=header) or "")


def test_behind_our_edge_the_address_that_it_added_is_judged_and_not_one_that_the_caller_wrote():
    """HAProxy adds the address that connected to it as the last one; the peer is HAProxy itself, on a trusted address."""
    assert tenant([f"203.0.113.5, {GATEWAY}", STRANGER], behind_edge=True, peer="127.0.0.1") is None
    assert tenant(["203.0.113.5", GATEWAY], behind_edge=True, peer="127.0.0.1") == "203.0.113.5"
    assert tenant(["192.0.2.1, 203.0.113.5, 10.7.7.7", GATEWAY], behind_edge=True, peer="127.0.0.1") == "203.0.113.5"
    edge = Callers(TRUSTED, "X-Tenant", behind_edge=True)
    assert edge.of([("x-tenant", "acme"), (FORWARDED, STRANGER)], "127.0.0.1").tenant is None
    assert edge.of([("x-tenant", "acme"), (FORWARDED, GATEWAY)], "127.0.0.1").tenant == "acme"


def test_who_has_no_owner_takes_turns_by_address():
    key = Key("ann", Limits(), share=Share(weight=3))
    table = [
        (Caller(key, address="a"), "ann", "ann", 3.0),
        (Caller(None, "t", "a"), "t", "t", 1.0),
        (Caller(), None, None, 1.0),
    ]
    for caller, owner, turn, weight in [*table, (Caller(None, None, "a"), None, "a", 1.0)]:
        assert (caller.owner, caller.turn, caller.weight) == (owner, turn, weight)


# Both transports


def gateway(**more) -> tuple[FakeEngine, Server]:
    """A server that trusts the address that the test's calls come from."""
    engine = FakeEngine()
    return engine, build_server(engine, **{"trusted": networks("127.0.0.1, 10.0.0.2")} | more)


def called(server: Server, *headers: tuple[str, str]) -> None:
    """One call over each transport."""

    async def run() -> None:
        async with server.http() as http:
            assert (await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)).status_code == 200
        async with serving(server) as channel:
            metadata = tuple((name.lower(), value) for name, value in headers)
            await GenerationServiceStub(channel()).Generate(pb.GenerateRequest(text="a"), metadata=metadata)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("header", "lines"),
    [(FORWARDED, ["192.0.2.1, 203.0.113.5"]), (FORWARDED, ["192.0.2.1", "203.0.113.5"]), ("X-Tenant", ["203.0.113.5"])],
)
def test_a_trusted_proxy_names_the_owner_over_both_transports(header, lines, caplog):
    engine, server = gateway(tenant_header=header)
    with caplog.at_level(logging.INFO, "attend.requests"):
        called(server, *((header, line) for line in lines))
    assert [request.owner for request in engine.requests] == ["203.0.113.5"] * 2
    assert [record.tenant for record in caplog.records] == ["203.0.113.5"] * 2
    assert all(", tenant 203.0.113.5, from 127.0.0.1" in record.getMessage() for record in caplog.records)


def test_over_both_transports_a_stranger_names_nobody():
    for header in (FORWARDED, "X-Tenant"):
        engine, server = gateway(trusted=networks("192.0.2.0/24"), tenant_header=header)
        called(server, (header, "203.0.113.5"))
        engine, edge = gateway(trusted=networks("192.0.2.0/24"), tenant_header=header, behind_edge=True)
        called(edge, (header, "203.0.113.5"), (FORWARDED, STRANGER))
        assert {request.owner for request in engine.requests} == {None}


def test_where_keys_are_set_the_key_is_the_owner_with_its_weight(tmp_path):
    write_keys(tmp_path / "keys", {"ann": Entry(digest_of(b"att_1"), share=Share(weight=2.5))})
    engine, server = gateway(keys=KeyRing(tmp_path / "keys"), trusted=())
    called(server, ("authorization", "Bearer att_1"), (FORWARDED, "203.0.113.5"))
    assert [(request.owner, request.weight) for request in engine.requests] == [("ann", 2.5)] * 2


# The priority


@pytest.mark.parametrize(("most", "asked", "given"), [(3, None, 3), (3, 3, 3), (3, 0, 0), (0, 0, 0), (9, 9, 9), (7, None, 5)])
def test_a_call_has_its_priority_up_to_that_of_its_key(tmp_path, most, asked, given):
    write_keys(tmp_path / "keys", {"ann": Entry(digest_of(b"att_1"), share=Share(max_priority=most))})
    engine = FakeEngine()
    server = build_server(engine, keys=KeyRing(tmp_path / "keys"))
    body = {"prompt": "a"} | ({} if asked is None else {"priority": asked})
    assert server.post(body, headers={"authorization": "Bearer att_1"}).status_code == 200
    assert [request.priority for request in engine.requests] == [given]


def test_a_priority_above_that_of_the_key_is_refused_by_field_limit_and_key_over_both_transports(tmp_path):
    write_keys(tmp_path / "keys", {"ann": Entry(digest_of(b"att_1"), share=Share(max_priority=3))})
    engine = FakeEngine()
    server = build_server(engine, keys=KeyRing(tmp_path / "keys"))
    wanted = "priority must be at most 3, the max_priority of API key 'ann'; got 4"
    for stream in (False, True):
        answer = server.post({"prompt": "a", "priority": 4, "stream": stream}, headers={"authorization": "Bearer att_1"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
        assert answer.json()["error"]["message"] == wanted

    async def over_grpc() -> None:
        async with serving(server) as channel:
            ask = pb.GenerateRequest(text="a", priority=4)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await GenerationServiceStub(channel()).Generate(ask, metadata=(("authorization", "Bearer att_1"),))
            assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, wanted)

    asyncio.run(over_grpc())
    assert not engine.requests


# The settings


@pytest.mark.parametrize("text", ["10.0.0.1/8", "gateway", "10.0.0.0/33", "10.0.0.1 10.0.0.2", "10.0.0.1:80"])
def test_a_proxy_that_is_no_address_stops_the_start(text):
    with pytest.raises(SettingError, match=r"trusted_proxies = .*neither an address nor a network") as refused:
        read_settings({"trusted_proxies": text}, {})
    assert text[:10] in str(refused.value)
    with pytest.raises(SettingError, match="ATTEND_TRUSTED_PROXIES"):
        read_settings({}, {"ATTEND_TRUSTED_PROXIES": text})


@pytest.mark.parametrize("name", ["", "a b", "x:y", "Authorization", "X-Api-Key", "cookie", "é"])
def test_a_header_that_cannot_be_one_or_holds_secrets_stops_the_start(name):
    with pytest.raises(SettingError, match=r"tenant_header = .*cannot be used"):
        read_settings({"tenant_header": name}, {})


def test_good_settings_of_tenants_are_kept():
    settings = read_settings({"trusted_proxies": " 10.0.0.0/8,::1 ,", "tenant_header": "X-Tenant"}, {})
    assert [str(each) for each in networks(settings.trusted_proxies)] == ["10.0.0.0/8", "::1/128"]


@pytest.mark.parametrize(("who", "turn"), [({}, "127.0.0.1"), ({FORWARDED: "203.0.113.5"}, "203.0.113.5")])
def test_a_long_body_is_read_in_the_turn_of_the_tenant_or_else_of_the_address(monkeypatch, who, turn):
    turns, genuine = [], body.run_exclusive

    def watched(work, arrival):
        turns.append(arrival.turn)
        return genuine(work, arrival)

    monkeypatch.setattr(body, "run_exclusive", watched)
    _, server = gateway()
    server.post({"prompt": "a", "unknown": "x" * body.INLINE_BYTES}, headers=who)
    assert turns == [turn]
