"""TLS: what is served with it, what stops a start, and how a new certificate is taken over while a server runs."""

import asyncio
import os
import socket
import ssl
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from attend.model.errors import SettingError
from attend.service.grpc_api.server import grpc_server
from attend.service.runtime import supervisor, tls
from attend.service.runtime.http_server import HttpServer, Loop, bind_socket, http_server
from attend.service.runtime.lifecycle import check_certificate
from attend.service.runtime.tls import Certificate, read_pair
from attend.service.settings import Settings, read_settings
from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc
from tests.fakes import FakeEngine, build_server
from tests.service.certificates import Authority, written
from tests.service.server import free_port, wait_for

ASK = {"prompt": "a", "max_tokens": 8}
SLOW = ("--num-threads", "1", "--dtype", "float32", "--backend", "torch")


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


# The files


@pytest.fixture
def files(authority, tmp_path) -> tuple[Path, Path]:
    """A good certificate and its key, which a test may spoil."""
    cert, key = authority.sign("good")
    return cert.rename(tmp_path / "tls.crt"), key.rename(tmp_path / "tls.key")


def told(files: tuple[Path, Path]) -> str:
    """The sentence that stops the start."""
    with pytest.raises(SettingError) as caught:
        check_certificate(Settings(tls_cert=str(files[0]), tls_key=str(files[1])))
    return str(caught.value)


def test_a_good_pair_is_no_reason_to_stop_or_to_warn(files, capfd):
    check_certificate(Settings(tls_cert=str(files[0]), tls_key=str(files[1])))
    check_certificate(Settings())
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("place", "name"), [(0, "tls_cert"), (1, "tls_key")])
def test_a_file_that_cannot_be_read_or_is_no_pem_stops_the_start_by_name(files, place, name):
    files[place].write_bytes(b"\x00 not PEM")
    what = "private key" if place else "certificate"
    assert told(files) == f"{name} {str(files[place])!r} holds no {what} in PEM"
    files[place].unlink()
    assert told(files) == f"{name} {str(files[place])!r} cannot be read: No such file or directory"
    files[place].mkdir()
    assert told(files) == f"{name} {str(files[place])!r} cannot be read: Is a directory"
    files[place].rmdir()
    os.mkfifo(files[place])  # it has no writer, and would be waited for
    assert told(files) == f"{name} {str(files[place])!r} cannot be read: not a regular file"
    files[place].unlink()
    files[place].symlink_to("/dev/zero")
    assert told(files) == f"{name} {str(files[place])!r} cannot be read: not a regular file"


def test_a_key_of_another_certificate_stops_the_start(files, authority):
    other = authority.sign("other")[1]
    whose = f"the first certificate in tls_cert {str(files[0])!r}"
    assert told((files[0], other)) == f"tls_key {str(other)!r} is not the key of {whose}"


def test_an_encrypted_key_stops_the_start_and_nobody_is_asked_for_its_password(files):
    files[1].write_bytes(written(ec.generate_private_key(ec.SECP256R1()), b"secret"))
    assert "encrypted" in told(files)


def test_an_expired_certificate_is_a_warning(authority, capfd):
    cert, key = authority.sign("old", days=-1)
    check_certificate(Settings(tls_cert=str(cert), tls_key=str(key)))
    assert capfd.readouterr().err == f"attend: clients will refuse tls_cert {str(cert)!r}: it has expired, or cannot be read\n"


def test_one_file_may_hold_both_and_a_chain_may_follow(files, authority):
    whole = files[0].read_text() + "\n\n" + authority.ca.read_text() + "\n" + files[1].read_text()
    files[0].write_text(whole)
    made = read_pair(str(files[0]), str(files[0]))
    assert made.count(b"BEGIN CERTIFICATE") == 2 and made.count(b"PRIVATE KEY") == 2
    assert tls.expiry(made) is not None


@pytest.mark.parametrize("days", [1, -1])
def test_when_a_certificate_ends_is_known_also_of_one_that_has(authority, days):
    cert, key = authority.sign("old", days=days)
    ends = x509.load_pem_x509_certificate(cert.read_bytes()).not_valid_after_utc.timestamp()
    assert tls.expiry(read_pair(str(cert), str(key))) == ends
    assert Certificate(str(cert), str(key)).expiry == ends


@pytest.mark.parametrize("name", ["tls_cert", "tls_key"])
def test_a_certificate_and_its_key_are_set_together(name):
    with pytest.raises(SettingError, match="must be set together"):
        read_settings({name: "a"}, {})


# One process


@dataclass
class Secure:
    """A replica behind uvicorn and grpc.aio with TLS, in a thread; its certificate is looked at when a test says so."""

    http: int
    grpc: int
    files: tuple[Path, Path]
    certificate: Certificate
    engine: FakeEngine
    loop: asyncio.AbstractEventLoop


@pytest.fixture
def secure(files) -> Iterator[Secure]:
    ready, engine = threading.Event(), FakeEngine()
    served: list[Secure] = []
    servers: list[HttpServer] = []
    stop = asyncio.Event()

    async def serve() -> None:
        replica, certificate = build_server(engine), Certificate(*map(str, files))
        place = free_port()
        server, listening = http_server(replica.app, 8, certificate.context), bind_socket("127.0.0.1", 0)
        rpcs = grpc_server(replica.methods, "127.0.0.1", place, 8, certificate.credentials)
        await rpcs.start()
        serving = asyncio.create_task(server.serve([listening]))
        served.append(Secure(listening.getsockname()[1], place, files, certificate, engine, asyncio.get_running_loop()))
        servers.append(server)
        ready.set()
        await stop.wait()
        server.end()
        await asyncio.gather(serving, rpcs.stop(1.0))

    def run() -> None:
        with asyncio.Runner(loop_factory=Loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30) and wait_for(lambda: servers[0].started)
    try:
        yield served[0]
    finally:
        served[0].loop.call_soon_threadsafe(stop.set)
        thread.join(30)


def subject(port: int, ca: Path, version: ssl.TLSVersion | None = None) -> str:
    """The name in the certificate that a new connection is shown."""
    trust = ssl.create_default_context(cafile=str(ca))
    trust.set_alpn_protocols(["h2", "http/1.1"])
    if version is not None:
        trust.minimum_version = ssl.TLSVersion.TLSv1
        trust.maximum_version = version
        trust.set_ciphers("ALL:@SECLEVEL=0")
    with (
        socket.create_connection(("127.0.0.1", port), 10) as wire,
        trust.wrap_socket(wire, server_hostname="localhost") as safe,
    ):
        return dict(pair for [pair] in safe.getpeercert()["subject"])["commonName"]


def renewed(files: tuple[Path, Path], authority: Authority, name: str) -> None:
    """Put another certificate in the place of this one."""
    for fresh, old in zip(authority.sign(name), files, strict=True):
        os.replace(fresh, old)


def channel(target: str, authority: Authority) -> grpc.Channel:
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(authority.ca.read_bytes()))


def client(url: str, authority: Authority) -> httpx.Client:
    return httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=str(authority.ca)), timeout=60)


def test_both_transports_stream_over_tls(secure, authority):
    with client(f"https://127.0.0.1:{secure.http}", authority) as http:
        assert http.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == "bcdefghi"
        assert http.post("/v1/completions", json=ASK | {"stream": True}).text.endswith("data: [DONE]\n\n")
    with channel(f"127.0.0.1:{secure.grpc}", authority) as wire:
        answers = list(rpc.GenerationServiceStub(wire).GenerateStream(pb.GenerateRequest(text="a", max_tokens=8), timeout=30))
    assert "".join(answer.outputs[0].text for answer in answers) == "bcdefghi"


def test_without_tls_a_call_is_refused_at_once(secure):
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{secure.http}/healthz", timeout=5)
    with grpc.insecure_channel(f"127.0.0.1:{secure.grpc}") as wire, pytest.raises(grpc.RpcError) as caught:
        rpc.GenerationServiceStub(wire).Generate(pb.GenerateRequest(text="a"), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_no_transport_speaks_a_version_before_1_2(secure, authority):
    for port in (secure.http, secure.grpc):
        assert subject(port, authority.ca, ssl.TLSVersion.TLSv1_2) == "good"
        with pytest.raises((ssl.SSLError, ConnectionError)):
            subject(port, authority.ca, ssl.TLSVersion.TLSv1_1)


def test_a_new_certificate_is_for_new_connections_and_cuts_no_stream(secure, authority):
    secure.engine.held = True
    texts: dict[str, str] = {}

    def over_http() -> None:
        with (
            client(f"https://127.0.0.1:{secure.http}", authority) as http,
            http.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as answer,
        ):
            texts["http"] = answer.read().decode()

    def over_grpc() -> None:
        with channel(f"127.0.0.1:{secure.grpc}", authority) as wire:
            call = rpc.GenerationServiceStub(wire).GenerateStream(pb.GenerateRequest(text="a", max_tokens=8), timeout=30)
            texts["grpc"] = "".join(answer.outputs[0].text for answer in call)

    threads = [threading.Thread(target=work) for work in (over_http, over_grpc)]
    for thread in threads:
        thread.start()
    assert wait_for(lambda: len(secure.engine.open) == 2)
    secure.loop.call_soon_threadsafe(secure.engine.release, 2)
    renewed(secure.files, authority, "next")
    secure.certificate.renew()
    assert subject(secure.http, authority.ca) == subject(secure.grpc, authority.ca) == "next"
    assert len(secure.engine.open) == 2
    secure.loop.call_soon_threadsafe(secure.engine.release, 100)
    for thread in threads:
        thread.join(30)
    assert texts["http"].endswith("data: [DONE]\n\n")
    assert texts["grpc"] == "bcdefghi"


def test_a_lack_of_descriptors_ends_no_server(secure, caplog, monkeypatch):
    """The files are looked at again and again, also while there are as many connections as there can be."""

    def lacking(*given):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(tls.os, "memfd_create", lacking)
    secure.certificate.renew()
    [line] = [record.getMessage() for record in caplog.records if record.name == "attend.tls"]
    assert "stays in use" in line and "Too many open files" in line


def test_a_bad_pair_leaves_the_last_good_one_in_use_and_is_told_once(secure, authority, caplog):
    secure.files[0].write_text("half a fi")
    for _ in range(3):
        secure.certificate.renew()
    assert subject(secure.http, authority.ca) == subject(secure.grpc, authority.ca) == "good"
    [line] = [record.getMessage() for record in caplog.records if record.name == "attend.tls"]
    assert "stays in use" in line and "holds no certificate" in line
    assert not secure.certificate.is_ok
    renewed(secure.files, authority, "mended")
    secure.certificate.renew()
    assert secure.certificate.is_ok
    assert subject(secure.http, authority.ca) == subject(secure.grpc, authority.ca) == "mended"


def test_grpc_is_imported_after_the_variables_of_one_process_are_set():
    """Else each handshake that fails writes a line, for callers without a key too."""
    rooms = "commands import cli", "runtime import single", "observe import tracing"
    imports = "; ".join(["import sys", *(f"from attend.service.{room}" for room in rooms)])
    assert subprocess.run([sys.executable, "-c", f"{imports}; sys.exit('grpc' in sys.modules)"]).returncode == 0


# Under Ray


def test_under_ray_a_certificate_stops_the_start_and_both_ways_are_named():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        from attend.service.runtime.deployment import build
    given = {"tls_cert": "a", "tls_key": "b"}
    for start in (lambda: supervisor.run(Settings(**given)), lambda: build(given)):
        with pytest.raises(SettingError, match="--single does, or a gateway"):
            start()
