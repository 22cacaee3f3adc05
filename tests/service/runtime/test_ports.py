"""Ports: what is taken is named, and two servers on one machine share none."""

import errno
import os
import socket

import pytest

from attend.model.errors import SettingError
from attend.service.runtime import ports
from attend.service.runtime.ports import check_ports, claim
from attend.service.runtime.single import claim_port
from attend.service.settings import Settings

SHIPPED = ports.START, ports.SLOTS


@pytest.fixture(autouse=True)
def own_slots(monkeypatch):
    """A few slots where neither a server of this machine nor Ray's workers have ports."""
    monkeypatch.setattr(ports, "START", 7000)
    monkeypatch.setattr(ports, "SLOTS", 5)


def listening(port: int = 0, host: str = "127.0.0.1") -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    return listener


def free_ports(count: int) -> list[int]:
    listeners = [listening() for _ in range(count)]
    numbers = [one.getsockname()[1] for one in listeners]
    for one in listeners:
        one.close()
    return numbers


def is_taken(port: int) -> bool:
    """True if a server cannot have it."""
    with pytest.raises(SettingError, match=f"^port {port} is taken"):
        check_ports(port, free_ports(1)[0])
    return True


def test_a_taken_port_is_named_with_its_setting():
    with listening() as listener:
        taken, other = listener.getsockname()[1], free_ports(1)[0]
        with pytest.raises(SettingError, match=f"^port {taken} is taken"):
            claim(taken, other)
        with pytest.raises(SettingError, match=f"^grpc_port {taken} is taken"):
            claim(other, taken)
    check_ports(taken, other)


@pytest.mark.skipif(not socket.has_ipv6, reason="Python has no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "::"])
def test_a_port_is_taken_whose_owner_listens_on_ipv6_alone(host):
    with socket.socket(socket.AF_INET6) as owner:
        owner.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            owner.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        owner.listen()
        assert is_taken(owner.getsockname()[1])


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_a_machine_without_ipv6_has_free_ports(monkeypatch, number):
    made = socket.socket

    def refuse(family, *rest):
        if family == socket.AF_INET6:
            raise OSError(number, os.strerror(number))
        return made(family, *rest)

    given = free_ports(2)
    monkeypatch.setattr(socket, "socket", refuse)
    check_ports(*given)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_port_is_taken_whatever_address_and_options_its_owner_has(reuse):
    """Ray binds its gRPC ports with SO_REUSEPORT: a second server could bind them too, and share its calls."""
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as owner:
            if reuse:
                owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            owner.bind((host, 0))
            owner.listen()
            assert is_taken(owner.getsockname()[1])


@pytest.mark.parametrize(
    ("port", "number", "told"),
    [
        (80, errno.EACCES, "80: Permission denied: ports below 1024 need root$"),
        (8080, errno.EACCES, "8080: Permission denied$"),
        (8080, errno.EPERM, "8080: Operation not permitted$"),
        (8080, errno.EMFILE, "8080: Too many open files$"),
    ],
)
@pytest.mark.parametrize("name", ["port", "grpc_port"])
def test_a_port_that_the_system_refuses_is_named_with_its_reason(monkeypatch, name, port, number, told):
    """Whoever serves asks `claim` or `claim_port`."""

    class Refused(socket.socket):
        def bind(self, address):
            if address[1] == port:
                raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", Refused)
    other = {"port": 8123, "grpc_port": 8124} | {name: port}
    for serve in (lambda: claim(other["port"], other["grpc_port"]), lambda: claim_port(Settings(**other))):
        with pytest.raises(SettingError, match=f"^{name} {told}"):
            serve()


def test_http_and_grpc_must_differ():
    with pytest.raises(SettingError, match="port and grpc_port are both 8123"):
        claim(8123, 8123)


def numbers(given: dict[str, str]) -> list[int]:
    """All ports of a slot, from Ray's variables."""
    named = {name.removeprefix("RAY_SERVE_").removesuffix("_PORT"): int(port) for name, port in given.items()}
    http = range(named.pop("DIRECT_INGRESS_MIN_HTTP"), named.pop("DIRECT_INGRESS_MAX_HTTP") + 1)
    grpc = range(named.pop("DIRECT_INGRESS_MIN_GRPC"), named.pop("DIRECT_INGRESS_MAX_GRPC") + 1)
    assert len(named) == 4 and min(len(http), len(grpc)) >= 90, "a port for each of the most replicas"
    return [*named.values(), *http, *grpc]


def test_two_servers_get_slots_that_share_no_port():
    http, grpc, other_http, other_grpc = free_ports(4)
    one, first = claim(http, grpc)
    two, second = claim(other_http, other_grpc)
    same, third = claim(http, grpc)
    with first, second, third:
        every = [*numbers(one), *numbers(two), *numbers(same)]
        assert len(every) == len(set(every))
    again, lock = claim(http, grpc)
    lock.close()
    assert again == one, "it is free again"


def test_a_slot_with_a_taken_port_is_passed_over_and_let_go():
    http, grpc = free_ports(2)
    first, lock = claim(http, grpc)
    lock.close()
    with listening(numbers(first)[-1]):
        second, lock = claim(http, grpc)
        lock.close()
    assert not set(numbers(first)) & set(numbers(second))
    third, lock = claim(http, grpc)
    lock.close()
    assert third == first


def test_when_no_slot_is_left_a_sentence_says_so(monkeypatch):
    monkeypatch.setattr(ports, "SLOTS", 1)
    http, grpc = free_ports(2)
    with claim(http, grpc)[1], pytest.raises(SettingError, match="all 1 ranges"):
        claim(http, grpc)


def test_the_public_ports_are_never_inside_the_slot():
    other = free_ports(1)[0]
    for http, grpc in ((7000, other), (other, 7000 + other % ports.SLOTS * ports.WIDTH)):
        found, lock = claim(http, grpc)
        lock.close()
        assert not {http, grpc} & set(numbers(found))


def test_the_shipped_slots_lie_below_the_ports_of_outgoing_connections():
    start, slots = SHIPPED
    assert start + slots * ports.WIDTH <= 32768
