"""TLS: what is served with it, what stops a start, and how a new certificate is taken over while a server runs."""

import asyncio
import contextlib
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
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
from attend.service.runtime import certificate_renewal
from attend.service.runtime.certificate_renewal import BadPair, doubt, pair
from attend.service.runtime.http_server import HttpServer, Loop, bind_socket, http_server
from attend.service.runtime.lifecycle import check_certificate, ready_line
from attend.service.runtime.tls import Certificate
from attend.service.settings import Settings, read_settings
from attend.v1 import generation_pb2 as pb
from attend.v1 import generation_pb2_grpc as rpc
from tests.fakes import FakeEngine, build_server
from tests.service.certificates import Authority, written
from tests.service.server import Server, free_port, running, wait_for

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


def test_a_damaged_certificate_stops_the_start(files):
    lines = files[0].read_text().splitlines()
    files[0].write_text("\n".join([lines[0], "AAAA" + lines[1][4:], *lines[2:]]))
    assert "cannot be used" in told(files)


def test_an_expired_certificate_is_a_warning(authority, capfd):
    cert, key = authority.sign("old", days=-1)
    check_certificate(Settings(tls_cert=str(cert), tls_key=str(key)))
    assert capfd.readouterr().err == f"attend: clients will refuse tls_cert {str(cert)!r}: certificate has expired\n"


def test_one_file_may_hold_both_and_a_chain_may_follow(files, authority):
    whole = files[0].read_text() + "\n\n" + authority.ca.read_text() + "\n" + files[1].read_text()
    files[0].write_text(whole)
    made = pair(str(files[0]), str(files[0]))
    assert made.count(b"BEGIN CERTIFICATE") == 2 and made.count(b"PRIVATE KEY") == 2
    assert b"\n\n" not in made, "HAProxy takes an empty line for the end"
    assert doubt(made) is None


@pytest.mark.parametrize("days", [1, -1])
def test_when_a_certificate_ends_is_known_also_of_one_that_has(authority, days):
    cert, key = authority.sign("old", days=days)
    ends = x509.load_pem_x509_certificate(cert.read_bytes()).not_valid_after_utc.timestamp()
    assert certificate_renewal.expiry(pair(str(cert), str(key))) == ends
    assert Certificate(str(cert), str(key)).expiry == ends


def test_what_haproxy_reads_is_for_its_user_alone(files, tmp_path):
    certificate_renewal.replace_private_file(tmp_path / "pair.pem", pair(*map(str, files)))
    assert (tmp_path / "pair.pem").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tls_cert": "a"}, "must be set together"),
        ({"tls_key": "a"}, "must be set together"),
        ({"tls_cert": "a", "tls_key": "b", "proxy": "python"}, "TLS needs proxy = haproxy"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused_by_name(given, words):
    with pytest.raises(SettingError, match=words):
        read_settings(given, {})


def test_the_start_up_line_says_https():
    words = dict.fromkeys(("dtype", "weights", "family", "device", "backend"), "x")
    words |= {"device_name": "x", "recorded": [0, 0]}
    facts = words | {"parameters": 1, "kv_tokens": 1, "kv_bytes": 1, "chats": False, "sampling": {}}
    assert ready_line(Settings(), facts).count("http://localhost:8000") == 3
    assert ready_line(Settings(tls_cert="a", tls_key="b"), facts).count("https://localhost:8000") == 3


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

    monkeypatch.setattr(certificate_renewal.os, "memfd_create", lacking)
    secure.certificate.renew()
    [line] = [record.getMessage() for record in caplog.records if record.name == "attend.tls"]
    assert "stays in use" in line and "Too many open files" in line


def test_a_bad_pair_leaves_the_last_good_one_in_use_and_is_told_each_minute(secure, authority, caplog, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(secure.certificate._complaint, "_clock", lambda: now[0])
    secure.files[0].write_text("half a fi")
    for seconds in (0, 1, 58, 1, 1):
        now[0] += seconds
        secure.certificate.renew()
    assert subject(secure.http, authority.ca) == subject(secure.grpc, authority.ca) == "good"
    lines = [record.getMessage() for record in caplog.records if record.name == "attend.tls"]
    assert len(lines) == 2 and all("stays in use" in line and "holds no certificate" in line for line in lines)
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


# HAProxy's helper


@pytest.fixture
def noted() -> list[str]:
    """What a HAProxy was told to say of its certificate."""
    return []


@pytest.fixture
def commanded(tmp_path, noted) -> Iterator[tuple[Path, list[str]]]:
    """The socket of a HAProxy that takes every command; what it was told of certificates."""
    path, got = tmp_path / "admin.sock", []
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                wire, _ = listening.accept()
                with wire:
                    text = wire.recv(1 << 16).decode("latin-1")
                    (noted if text.startswith("set map") else got).append(text)
                    wire.sendall(b"Transaction created\n" if text.startswith("set ssl") else b"Success!\n")

    threading.Thread(target=serve, daemon=True).start()
    yield path, got
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def follow(files: tuple[Path, Path], pem: Path, path: Path, log: Path, monkeypatch, *steps) -> None:
    """Follow the files: before each look a step is made, and after the last one another HAProxy is there."""
    left = list(steps)
    (pem.parent / "current").write_text(f"{os.getpid()}\n")

    def sleep(seconds: float) -> None:
        left.pop(0)()
        if not left:
            (pem.parent / "current").write_text("1\n")

    monkeypatch.setattr(certificate_renewal.time, "sleep", sleep)
    certificate_renewal.follow_certificate(*map(str, files), pem, str(path), str(os.getpid()), str(log), "text")


def test_haproxy_is_told_of_a_new_pair_once_and_never_of_a_bad_one(files, authority, tmp_path, commanded, monkeypatch):
    path, got = commanded
    pem, log = tmp_path / "tls.pem", tmp_path / "log"
    certificate_renewal.replace_private_file(pem, pair(*map(str, files)))
    nothing = lambda: None  # noqa: E731
    spoil = lambda: files[1].write_text("x")  # noqa: E731
    change = lambda: renewed(files, authority, "next")  # noqa: E731
    follow(files, pem, path, log, monkeypatch, nothing, spoil, nothing, change, nothing)
    fresh = pair(*map(str, files))
    assert got == [f"set ssl cert {pem} <<\n{fresh.decode()}\n", f"commit ssl cert {pem}\n"]
    assert pem.read_bytes() == fresh, "a HAProxy that starts later has it too"
    bad, good = log.read_text().splitlines()
    assert "ERROR attend.tls" in bad and "holds no private key" in bad
    assert "INFO attend.tls: new connections use the new certificate" in good


def test_haproxy_says_whether_the_pair_in_use_is_that_of_the_files_and_when_it_ends(
    files, authority, tmp_path, commanded, noted, monkeypatch
):
    path, _ = commanded
    pem, log = tmp_path / "tls.pem", tmp_path / "log"
    certificate_renewal.replace_private_file(pem, pair(*map(str, files)))
    first, nothing = certificate_renewal.expiry(pem.read_bytes()), lambda: None

    def change() -> None:
        cert, key = authority.sign("longer", days=9)
        files[0].write_bytes(cert.read_bytes())
        files[1].write_bytes(key.read_bytes())

    follow(files, pem, path, log, monkeypatch, nothing, lambda: files[1].write_text("x"), nothing, change, nothing)
    said = [line.split()[-2:] for line in noted]
    last = certificate_renewal.expiry(pem.read_bytes())
    told = [("1", first), ("0", first), ("1", last)]
    assert said == [pair for ok, expiry in told for pair in (["ok", ok], ["expiry", f"{expiry:.0f}"])]
    assert certificate_renewal.certificate_facts(pem).read_text() == f"ok 1\nexpiry {last:.0f}\n"


def test_a_haproxy_that_starts_while_the_files_are_bad_says_so(files, tmp_path):
    command = [sys.executable, "-I", certificate_renewal.__file__, *map(str, files), str(tmp_path / "tls.pem")]
    assert subprocess.run(command).returncode == 0
    assert (tmp_path / "tls.map").read_text().startswith("ok 1\nexpiry 1")
    files[0].unlink()
    assert subprocess.run(command, capture_output=True).returncode == 1
    assert (tmp_path / "tls.map").read_text().startswith("ok 0\nexpiry 1")


def test_a_certificate_with_a_note_in_another_encoding_is_handed_over_too(files, authority, tmp_path, commanded, monkeypatch):
    """Text outside of the PEM blocks is allowed, and need not be UTF-8. A log that cannot be written stops nothing."""
    path, got = commanded
    pem = tmp_path / "tls.pem"
    certificate_renewal.replace_private_file(pem, pair(*map(str, files)))

    def change() -> None:
        renewed(files, authority, "next")
        files[0].write_bytes("# Schlüssel\n".encode("latin-1") + files[0].read_bytes())

    follow(files, pem, path, tmp_path / "no folder" / "log", monkeypatch, change, lambda: None)
    assert [line.split()[0] for line in got] == ["set", "commit"]
    assert b"Schl\xfcssel" in pem.read_bytes()


def test_a_haproxy_that_does_not_answer_is_told_again(files, authority, tmp_path, commanded, monkeypatch):
    path, got = commanded
    pem, log, away = tmp_path / "tls.pem", tmp_path / "log", tmp_path / "away"
    certificate_renewal.replace_private_file(pem, pair(*map(str, files)))
    path.rename(away)
    change = lambda: renewed(files, authority, "next")  # noqa: E731
    follow(files, pem, path, log, monkeypatch, change, lambda: None, lambda: away.rename(path))
    assert len(got) == 2
    assert len(log.read_text().splitlines()) == 2


def test_a_new_pair_is_handed_over_also_where_files_beside_it_were_removed(files, authority, tmp_path, commanded, monkeypatch):
    path, got = commanded
    pem, log = tmp_path / "tls.pem", tmp_path / "log"
    certificate_renewal.replace_private_file(pem, pair(*map(str, files)))

    def remove() -> None:
        for name in ("current", "tls.pem", "tls.map"):
            (tmp_path / name).unlink(missing_ok=True)

    follow(files, pem, path, log, monkeypatch, remove, lambda: renewed(files, authority, "next"), lambda: None)
    assert [line.split()[0] for line in got] == ["set", "commit"]
    assert pem.read_bytes() == pair(*map(str, files))


def test_a_line_for_a_collector_is_json(tmp_path):
    certificate_renewal.say("error", 'a "b"', str(tmp_path / "log"), "json")
    line = json.loads((tmp_path / "log").read_text())
    assert (line["level"], line["logger"], line["message"]) == ("error", "attend.tls", 'a "b"')


def test_the_helper_needs_no_module_of_ours(files, tmp_path):
    command = [sys.executable, "-I", certificate_renewal.__file__, *map(str, files), str(tmp_path / "tls.pem")]
    assert subprocess.run(command, cwd="/").returncode == 0
    assert (tmp_path / "tls.pem").read_bytes() == pair(*map(str, files))
    files[0].unlink()
    failed = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("attend: tls_cert ")


def test_a_bad_pair_is_an_error_of_its_own(files):
    files[0].unlink()
    with pytest.raises(BadPair):
        pair(*map(str, files))


# Ray Serve


def test_an_application_whose_haproxy_would_speak_without_tls_is_refused():
    """Serve's configuration reaches replicas alone."""
    with warnings.catch_warnings():
        # Ray 2.60 declares its own fields in pydantic's old way; nothing of ours does.
        warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field` is deprecated")
        from attend.service.runtime.deployment import build
    with pytest.raises(SettingError, match="set ATTEND_TLS_CERT and ATTEND_TLS_KEY"):
        build({"tls_cert": "a", "tls_key": "b"})


@pytest.mark.long
@pytest.mark.ray
def test_a_server_with_haproxy_streams_over_tls_and_takes_over_a_new_certificate(authority, files, tmp_path):
    flags = (*SLOW, "--tls-cert", os.path.relpath(files[0]), "--tls-key", os.path.relpath(files[1]))
    with running(tmp_path / "log", *flags) as server:
        assert f"Ready: https://localhost:{server.http}" in server.output()
        long = {"prompt": "def f(x):", "max_tokens": 300, "ignore_eos": True, "stream": True}
        url = f"https://127.0.0.1:{server.http}"
        with client(url, authority) as http, http.stream("POST", "/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            streams_over_grpc(server, authority)
            refuses_plain_calls(server)
            renewed(files, authority, "next")
            since = time.monotonic()
            ports = (server.http, server.grpc)
            assert wait_for(lambda: {subject(port, authority.ca) for port in ports} == {"next"}, 10)
            assert time.monotonic() - since < 10
            with client(url, authority) as other:
                page = other.get("/metrics").text
            assert re.search(r"^attend_requests_running\S* 1", page, re.MULTILINE), "the stream goes on"
            assert [line for line in lines if line][-1] == "data: [DONE]"
        checks_itself(server, authority, url)
        assert "new connections use the new certificate" in server.output()
        server.stop()
        assert wait_for(lambda: server.processes() == [])


def streams_over_grpc(server: Server, authority: Authority) -> None:
    request = pb.GenerateRequest(text="def f(x):", max_tokens=8, stopping=pb.StoppingCriteria(ignore_eos=True))
    with channel(server.target, authority) as wire:
        answers = list(rpc.GenerationServiceStub(wire).GenerateStream(request, timeout=30))
    assert answers[-1].outputs[0].finish_info.num_output_tokens == 8


def refuses_plain_calls(server: Server) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{server.url}/healthz", timeout=5)
    with grpc.insecure_channel(server.target) as wire, pytest.raises(grpc.RpcError) as caught:
        rpc.GenerationServiceStub(wire).Generate(pb.GenerateRequest(text="a"), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def checks_itself(server: Server, authority: Authority, url: str) -> None:
    command = [sys.executable, "-m", "attend.service.commands.cli", "check", url, "--grpc", server.target]
    done = subprocess.run(command, env={**os.environ, "SSL_CERT_FILE": str(authority.ca)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
