"""Certificates for tests of TLS, made on the spot: an authority of its own, and what it signs for 127.0.0.1."""

import datetime as dt
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = dt.datetime.now(dt.UTC)


class Authority:
    """Signs certificates. `ca` is its own, in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self._signed(self._name, self._key.public_key(), days=30, ca=True))

    def sign(self, name: str, days: float = 1) -> tuple[Path, Path]:
        """The files of a new certificate and its key; `name` is its subject. It began two days ago."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert, secret = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert.write_bytes(self._signed(subject, key.public_key(), days=days, ca=False))
        secret.write_bytes(written(key))
        return cert, secret

    def _signed(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, *, days: float, ca: bool) -> bytes:
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - dt.timedelta(days=2))
            .not_valid_after(NOW + dt.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if ca:
            made = made.add_extension(x509.KeyUsage(*[False] * 5, True, True, False, False), critical=True)
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def written(key: ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    """A key in PEM, encrypted where there is a password."""
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)
