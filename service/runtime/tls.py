"""TLS of one process: a certificate and its key, checked, and renewed while it serves."""

import errno
import logging
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from stat import S_ISREG

import grpc

from attend.model.errors import SettingError

ANY_TIME = ssl.VerifyFlags(0x20_0000)
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not name."""

log = logging.getLogger("attend.tls")


def read_pair(cert: str, key: str) -> bytes:
    """The certificates and the key as one text in PEM. Raises SettingError, which names the setting and the file."""
    texts = {"tls_cert": _read("tls_cert", cert), "tls_key": _read("tls_key", key)}
    for name, path, mark in (("tls_cert", cert, b"-----BEGIN CERTIFICATE-----"), ("tls_key", key, b"PRIVATE KEY-----")):
        if mark not in texts[name]:
            what = "certificate" if name == "tls_cert" else "private key"
            raise SettingError(f"{name} {path!r} holds no {what} in PEM")
    whole = b"\n".join(dict.fromkeys(texts.values()))  # one file may hold both
    try:
        load_pair(new_context(), whole)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingError(f"tls_key {key!r} is not the key of the first certificate in tls_cert {cert!r}") from error
        raise SettingError(f"tls_cert {cert!r} and tls_key {key!r} cannot be used: {error.reason or error}") from error
    return whole


def new_context() -> ssl.SSLContext:
    """What a server that speaks TLS 1.2 and 1.3 begins with."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    return made


def load_pair(context: ssl.SSLContext, whole: bytes) -> ssl.SSLContext:
    """Give a context the certificates and the key: its new connections use them. Raises SettingError for an encrypted key."""

    def ask() -> str:
        raise SettingError("tls_key is encrypted: a server cannot type its password")

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


def expiry(whole: bytes) -> float | None:
    """When the certificate ends, or has ended, in seconds since 1970. None where no client could read it.

    Python has no other reader of certificates than the side of a client that has been shown one.
    """
    server, client = load_pair(new_context(), whole), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ANY_TIME
    with _file(whole) as path:
        client.load_verify_locations(path)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
    for side in sides * 3:  # no handshake has more flights
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            return None
    return float(ssl.cert_time_to_seconds(str((sides[0].getpeercert() or {})["notAfter"])))


def _read(name: str, path: str) -> bytes:
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not S_ISREG(os.fstat(file.fileno()).st_mode):  # a FIFO or a device could be waited for for ever
                raise OSError(errno.EINVAL, "not a regular file")
            return file.read()
    except OSError as error:
        raise SettingError(f"{name} {path!r} cannot be read: {error.strerror}") from error


class Certificate:
    """The certificate of both transports. Connections that are open keep the one that they began with. Raises SettingError."""

    def __init__(self, cert: str, key: str) -> None:
        self._places = cert, key
        self._loaded = read_pair(cert, key)
        self.problem = ""
        """What is wrong with the files that are not taken over; empty where nothing is."""
        self.expiry = expiry(self._loaded)
        """When the certificate in use ends, in seconds since 1970."""
        self.context = load_pair(new_context(), self._loaded)
        """For HTTP: new connections use what it has loaded last."""
        self.credentials = grpc.dynamic_ssl_server_credentials(self._configuration(), self._configuration)
        """For gRPC, which asks for the configuration at each new connection."""

    def renew(self) -> None:
        """Look at the files, and load them where they have changed. Bad ones leave the last good ones in use, and are told."""
        try:
            if (fresh := read_pair(*self._places)) != self._loaded:
                load_pair(self.context, fresh)
                self._loaded, self.expiry = fresh, expiry(fresh)
                log.info("new connections use the new certificate")
            self.problem = ""
        except (SettingError, OSError) as error:
            if str(error) != self.problem:
                self.problem = str(error)
                log.error("the certificate that was read before stays in use: %s", error)

    @property
    def is_ok(self) -> bool:
        """True if the certificate in use is that of the files."""
        return not self.problem

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self._loaded, self._loaded)])
