"""The certificate of TLS and its key: read, tried, and given to a HAProxy that runs.

HAProxy's start script runs this file by its path, so it imports nothing but the standard library:

    renew.py CERT KEY PEM                        writes both into PEM, which HAProxy reads
    renew.py CERT KEY PEM SOCKET PID LOG FORMAT  hands new ones to HAProxy, as long as that is the process PID
"""

import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SECONDS = 1.0
"""How often the files are looked at."""
TIMEOUT_SECONDS = 5.0
STANDARD_ERROR = "/proc/self/fd/2"


class BadPair(Exception):
    """A certificate and a key that cannot be served. The sentence names the setting and the file."""


def pair(cert: str, key: str) -> bytes:
    """The certificates and the key as one text in PEM. Raises BadPair."""
    texts = {"tls_cert": _read("tls_cert", cert), "tls_key": _read("tls_key", key)}
    for name, path, mark in (("tls_cert", cert, b"-----BEGIN CERTIFICATE-----"), ("tls_key", key, b"PRIVATE KEY-----")):
        if mark not in texts[name]:
            what = "certificate" if name == "tls_cert" else "private key"
            raise BadPair(f"{name} {path!r} holds no {what} in PEM")
    # One file may hold both. HAProxy takes an empty line for the end of the text.
    lines = [line.rstrip() for text in dict.fromkeys(texts.values()) for line in text.splitlines() if line.strip()]
    whole = b"\n".join(lines) + b"\n"
    try:
        load(context(), whole)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadPair(f"tls_key {key!r} is not the key of the first certificate in tls_cert {cert!r}") from error
        raise BadPair(f"tls_cert {cert!r} and tls_key {key!r} cannot be used: {error.reason or error}") from error
    return whole


def context() -> ssl.SSLContext:
    """What a server that speaks TLS 1.2 and 1.3 begins with."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    return made


def load(made: ssl.SSLContext, whole: bytes) -> ssl.SSLContext:
    """Give a context the certificates and the key: its new connections use them. Raises BadPair for an encrypted key."""

    def ask() -> str:
        raise BadPair("tls_key is encrypted: a server cannot type its password")

    with _file(whole) as path:
        made.load_cert_chain(path, password=ask)
    return made


@contextmanager
def _file(whole: bytes) -> Iterator[str]:
    """A file in memory: Python reads keys from files alone, and this one is never on a disk."""
    with os.fdopen(os.memfd_create("attend-tls"), "wb") as file:
        file.write(whole)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def doubt(whole: bytes) -> str | None:
    """Why a client would not trust the certificate, whoever signed it: it has expired, for example. None where it would."""
    server, client = load(context(), whole), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    with _file(whole) as path:
        client.load_verify_locations(path)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    for side in sides * 3:  # no handshake has more flights
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message
        except ssl.SSLError as error:
            return error.reason
    return None


def write(path: Path, whole: bytes) -> None:
    """Replace a file whole. Nobody else may read it."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(whole)
    fresh.replace(path)


def hand_over(path: str, pem: Path, whole: bytes) -> None:
    """Have a running HAProxy use `whole` for new connections. Raises OSError."""
    _command(path, b"set ssl cert %s <<\n%s\n" % (bytes(pem), whole), "Transaction ")
    _command(path, b"commit ssl cert %s\n" % bytes(pem), "Success!")


def _command(path: str, text: bytes, wanted: str) -> None:
    with socket.socket(socket.AF_UNIX) as wire:
        wire.settimeout(TIMEOUT_SECONDS)
        wire.connect(path)
        wire.sendall(text)
        answer = b"".join(iter(lambda: wire.recv(4096), b"")).decode(errors="replace")
    if wanted not in answer:
        raise OSError(f"HAProxy does not take the new certificate: {answer.strip()[:200]}")


def follow(cert: str, key: str, pem: Path, path: str, pid: str, log: str, style: str) -> None:
    """Hand over each new pair to HAProxy, while it is the process `pid`. A bad pair leaves the last good one, and is told."""
    loaded, told = pem.read_bytes(), ""
    while (pem.parent / "current").read_text().strip() == pid and Path(f"/proc/{pid}").exists():
        time.sleep(SECONDS)
        try:
            if (fresh := pair(cert, key)) != loaded:
                write(pem, fresh)
                hand_over(path, pem, fresh)
                loaded, told = fresh, ""
                say("info", "new connections use the new certificate", log, style)
        except (BadPair, OSError) as error:
            if str(error) != told:
                told = str(error)
                say("error", f"the certificate that was read before stays in use: {told}", log, style)


def say(level: str, message: str, log: str, style: str, logger: str = "attend.tls") -> None:
    """A line for the log of the server."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 {level.upper()} {logger}: {message}"
    if style == "json":
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        line = json.dumps({"time": stamp, "level": level, "logger": logger, "message": message})
    with suppress(OSError), open(log or STANDARD_ERROR, "a", encoding="utf-8") as file:  # a full disk stops no certificate
        file.write(line + "\n")


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadPair(f"{name} {path!r} cannot be read: {error.strerror}") from error


if __name__ == "__main__":
    given_cert, given_key, given_pem, *rest = sys.argv[1:]
    if rest:
        follow(given_cert, given_key, Path(given_pem), *rest)
    else:
        try:
            write(Path(given_pem), pair(given_cert, given_key))
        except BadPair as problem:
            sys.exit(f"attend: {problem}")
