"""TLS certificates: read, checked, and handed to a running HAProxy.

HAProxy's start script runs this file by its path, so it imports nothing but the standard library:

    certificate_renewal.py CERT KEY PEM                        writes both into PEM, which HAProxy reads, and notes beside it
    certificate_renewal.py CERT KEY PEM SOCKET PID LOG FORMAT  hands new ones to HAProxy, as long as that is the process PID
"""

import errno
import json
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG

SECONDS = 1.0
"""How often the files are looked at."""
TIMEOUT_SECONDS = 5.0
COMPLAIN_SECONDS = 60.0
"""How often the log names a pair that stays bad."""
ANY_TIME = ssl.VerifyFlags(0x20_0000)
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not name."""
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
        load_pair(context(), whole)
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


def load_pair(context: ssl.SSLContext, whole: bytes) -> ssl.SSLContext:
    """Give a context the certificates and the key: its new connections use them. Raises BadPair for an encrypted key."""

    def ask() -> str:
        raise BadPair("tls_key is encrypted: a server cannot type its password")

    with _file(whole) as path:
        context.load_cert_chain(path, password=ask)
    return context


@contextmanager
def _file(whole: bytes) -> Iterator[str]:
    """A file in memory: Python reads keys from files alone, and this one is never on a disk."""
    with os.fdopen(os.memfd_create("attend-tls"), "wb") as file:
        file.write(whole)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def doubt(whole: bytes) -> str | None:
    """Why a client would not trust the certificate, whoever signed it: it has expired, for example. None where it would."""
    try:
        _handshake(whole)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError as error:
        return error.reason
    return None


def expiry(whole: bytes) -> float | None:
    """When the certificate ends, or has ended, in seconds since 1970. None where no client could read it."""
    try:
        seen = _handshake(whole, ANY_TIME).getpeercert() or {}
    except (ssl.SSLError, BadPair):
        return None
    return float(ssl.cert_time_to_seconds(str(seen["notAfter"])))


def _handshake(whole: bytes, flags: ssl.VerifyFlags = ssl.VerifyFlags.VERIFY_DEFAULT) -> ssl.SSLObject:
    """The side of a client that has been shown the certificate. Raises SSLError where it does not trust it."""
    server, client = load_pair(context(), whole), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | flags
    with _file(whole) as path:
        client.load_verify_locations(path)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    for side in sides * 3:  # no handshake has more flights
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return sides[0]


class Complaint:
    """What is wrong with a pair that is not taken over: told when it changes, and each minute while it stays."""

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._next = 0.0
        self.text = ""
        """Empty where nothing is wrong."""

    def make(self, text: str) -> None:
        """Tell, unless it was told within the last minute."""
        if text != self.text or self._clock() >= self._next:
            self.text, self._next = text, self._clock() + COMPLAIN_SECONDS
            self._tell(f"the certificate that was read before stays in use: {text}")

    def end(self) -> None:
        """Forget the last complaint: the certificate can be used again."""
        self.text = ""


def replace_private_file(path: Path, whole: bytes) -> None:
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


def certificate_facts(pem: Path) -> Path:
    """The map of HAProxy's with what the metrics page says of a certificate: `ok` and `expiry`."""
    return pem.with_suffix(".map")


def note(pem: Path, whole: bytes, *, is_ok: bool) -> dict[str, str]:
    """Write that map, for the certificate `whole` in use; `is_ok`: it is that of the files. Returns what it holds."""
    noted = {"ok": str(int(is_ok)), "expiry": f"{expiry(whole) or 0:.0f}"}
    replace_private_file(certificate_facts(pem), "".join(f"{name} {value}\n" for name, value in noted.items()).encode())
    return noted


def publish(path: str, table: Path, entries: dict[str, str]) -> None:
    """Have a running HAProxy say so. Raises OSError."""
    for name, value in entries.items():
        _command(path, b"set map %s %s %s\n" % (bytes(table), name.encode(), value.encode()), "")


def _command(path: str, text: bytes, wanted: str) -> None:
    with socket.socket(socket.AF_UNIX) as wire:
        wire.settimeout(TIMEOUT_SECONDS)
        wire.connect(path)
        wire.sendall(text)
        answer = b"".join(iter(lambda: wire.recv(4096), b"")).decode(errors="replace")
    if wanted not in answer:
        raise OSError(f"HAProxy does not take the new certificate: {answer.strip()[:200]}")


def follow_certificate(cert: str, key: str, pem: Path, path: str, pid: str, log: str, style: str) -> None:
    """Hand over each new pair to HAProxy, while it is the process `pid`. A bad pair leaves the last good one, and is told."""
    loaded, complaint = pem.read_bytes(), Complaint(lambda text: say("error", text, log, style))
    noted: tuple[bytes, bool] | None = None  # HAProxy may have read an older note
    while _is_current(pem, pid) and Path(f"/proc/{pid}").exists():
        time.sleep(SECONDS)
        try:
            if (fresh := pair(cert, key)) != loaded:
                replace_private_file(pem, fresh)
                hand_over(path, pem, fresh)
                loaded = fresh
                say("info", "new connections use the new certificate", log, style)
            complaint.end()
        except (BadPair, OSError) as error:
            complaint.make(str(error))
        with suppress(OSError):  # another look follows
            if noted != (now := (loaded, not complaint.text)):
                publish(path, certificate_facts(pem), note(pem, loaded, is_ok=now[1]))
                noted = now


def _is_current(pem: Path, pid: str) -> bool:
    """True if no other HAProxy has taken its place. Where somebody removed the file that says so, it is rewritten soon."""
    try:
        return (pem.parent / "current").read_text().strip() == pid
    except OSError:
        return True


def say(level: str, message: str, log: str, style: str, logger: str = "attend.tls") -> None:
    """A line for the log of the server."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
    line = f"{stamp} {level.upper()} {logger}: {message}"
    if style == "json":
        line = json.dumps({"time": stamp, "level": level, "logger": logger, "message": message})
    with suppress(OSError), open(log or STANDARD_ERROR, "a", encoding="utf-8") as file:  # a full disk stops no certificate
        file.write(line + "\n")


def _read(name: str, path: str) -> bytes:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not S_ISREG(os.fstat(file.fileno()).st_mode):  # a FIFO or a device could be waited for for ever
                raise OSError(errno.EINVAL, "not a regular file")
            return file.read()
    except OSError as error:
        raise BadPair(f"{name} {path!r} cannot be read: {error.strerror}") from error


if __name__ == "__main__":
    given_cert, given_key, given_pem, *rest = sys.argv[1:]
    if rest:
        follow_certificate(given_cert, given_key, Path(given_pem), *rest)
    else:
        the_pem = Path(given_pem)
        try:
            replace_private_file(the_pem, pair(given_cert, given_key))
            note(the_pem, the_pem.read_bytes(), is_ok=True)
        except BadPair as problem:
            if the_pem.exists():
                note(the_pem, the_pem.read_bytes(), is_ok=False)
            sys.exit(f"attend: {problem}")
