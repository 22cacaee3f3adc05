"""Ports: what is taken is named, and two servers on one machine share none."""

import errno
import os
import socket
import tempfile
from pathlib import Path

import pytest

from attend.model.errors import SettingError
from attend.service.runtime import ports
from attend.service.runtime.ports import Ports, claim, is_free
from attend.service.runtime.single import claim_port
from attend.service.settings import Settings

SHIPPED = ports.HTTP_START, ports.GRPC_START, ports.SLOTS


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    """Locks of their own, and a few slots where neither a server of this machine nor Ray's workers have ports."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ports, "HTTP_START", 7000)
    monkeypatch.setattr(ports, "GRPC_START", 7500)
    monkeypatch.setattr(ports, "SLOTS", 5)
    return tmp_path


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


def test_a_taken_port_is_named_with_its_setting():
    with listening() as listener:
        taken, other = listener.getsockname()[1], free_ports(1)[0]
        assert not is_free(taken)
        with pytest.raises(SettingError, match=f"^port {taken} is taken"):
            claim(taken, other)
        with pytest.raises(SettingError, match=f"^grpc_port {taken} is taken"):
            claim(other, taken)
    assert is_free(taken)


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
        assert not is_free(owner.getsockname()[1])


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_a_machine_without_ipv6_has_free_ports(monkeypatch, number):
    made = socket.socket

    def refuse(family, *rest):
        if family == socket.AF_INET6:
            raise OSError(number, os.strerror(number))
        return made(family, *rest)

    port = free_ports(1)[0]
    monkeypatch.setattr(socket, "socket", refuse)
    assert is_free(port)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_port_is_taken_whatever_address_and_options_its_owner_has(reuse):
    """Ray binds its gRPC ports with SO_REUSEPORT: a second server could bind them too, and share its calls."""
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket() as owner:
            if reuse:
                owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            owner.bind((host, 0))
            owner.listen()
            assert not is_free(owner.getsockname()[1])


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


def test_two_servers_get_slots_that_share_no_port():
    http, grpc, other_http, other_grpc = free_ports(4)
    one, first = claim(http, grpc)
    two, second = claim(other_http, other_grpc)
    same, third = claim(http, grpc)
    with first, second, third:
        assert len({one.slot, two.slot, same.slot}) == 3
        assert len({*one.inner, *two.inner, *same.inner}) == 3 * 2 * ports.WIDTH


def test_a_slot_is_free_again_when_its_lock_is_closed():
    http, grpc = free_ports(2)
    first, lock = claim(http, grpc)
    lock.close()
    second, lock = claim(http, grpc)
    lock.close()
    assert first == second


def test_a_slot_with_a_taken_port_is_passed_over_and_its_lock_let_go():
    http, grpc = free_ports(2)
    first, lock = claim(http, grpc)
    lock.close()
    with listening(first.inner[-1]):
        second, lock = claim(http, grpc)
        lock.close()
    assert second.slot == (first.slot + 1) % ports.SLOTS
    third, lock = claim(http, grpc)
    lock.close()
    assert third == first


def test_when_no_slot_is_left_a_sentence_says_so(monkeypatch):
    monkeypatch.setattr(ports, "SLOTS", 1)
    http, grpc = free_ports(2)
    with claim(http, grpc)[1], pytest.raises(SettingError, match="all 1 ranges"):
        claim(http, grpc)


def test_a_lock_file_that_cannot_be_opened_is_somebody_elses_slot(own_locks):
    """In a shared /tmp another user's lock cannot be opened for writing."""
    http, grpc = free_ports(2)
    (own_locks / f"attend-ports-{http % ports.SLOTS}.lock").mkdir()
    found, lock = claim(http, grpc)
    lock.close()
    assert found.slot == (http + 1) % ports.SLOTS


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only"), (errno.EACCES, "denied")]
)
def test_a_temporary_folder_that_takes_no_lock_is_named_with_the_reason(number, words, own_locks, monkeypatch):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SettingError, match=f"{own_locks}/attend-ports-.* cannot be written: .*{words}"):
        claim(*free_ports(2))


@pytest.mark.parametrize("public", ["HTTP_START", "GRPC_START"])
def test_the_public_ports_are_never_inside_the_slot(public):
    inside = getattr(ports, public)  # port 7000 % 5 slots is slot 0, which begins there
    other = free_ports(1)[0]
    for http, grpc in ((inside, other), (other, inside + other % ports.SLOTS * ports.WIDTH)):
        found, lock = claim(http, grpc)
        lock.close()
        assert not {http, grpc} & set(found.inner)


@pytest.mark.parametrize("slot", [0, 7, 49])
def test_rays_ports_are_distinct_and_inside_the_slot(slot):
    mine = Ports(8000, 9000, slot)
    given = {name: int(value) for name, value in mine.environment().items()}
    http = range(given.pop("RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"), given.pop("RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT") + 1)
    grpc = range(given.pop("RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT"), given.pop("RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT") + 1)
    every = [*http, *grpc, *given.values()]
    assert len(given) == 4
    assert len(every) == len(set(every))
    assert set(every) <= set(mine.inner)
    assert min(len(http), len(grpc)) >= 90  # a port for each of the most replicas


def test_the_shipped_slots_lie_below_the_ports_of_outgoing_connections():
    http_start, grpc_start, slots = SHIPPED
    assert http_start + slots * ports.WIDTH <= grpc_start
    assert grpc_start + slots * ports.WIDTH <= 32768
