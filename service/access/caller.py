"""Caller identification: by API key, else by what a trusted proxy says (tenant), else by address.

A caller's own X-Forwarded-For proves nothing. Two may add to it what counts: our HAProxy in front of Ray Serve, which adds the
address that connected to it, and the proxies that the setting `trusted_proxies` names.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from attend.model.params import DEFAULT_PRIORITY
from attend.service.access.quota import Key

Network = IPv4Network | IPv6Network
FORWARDED = "x-forwarded-for"
TENANT = re.compile(r"[A-Za-z0-9._:/+=@|~-]{1,128}")
"""A tenant's name stands in messages and log lines, as a key's does; e-mail addresses and ids of identity providers fit."""
HEADER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
SECRET = ("authorization", "x-api-key", "cookie", "proxy-authorization")
"""Headers that hold secrets, and must not be logged as a name."""
MAX_HOPS = 16
"""Addresses of trusted proxies that are passed over in one X-Forwarded-For."""
MAX_FORWARDED = 256
"""Characters of X-Forwarded-For that a log line shows, of its end: what is before it may be made up."""
BATCHES = "lines of batches"
"""The owner of all lines of batches; no key and no tenant has a space in its name."""
BATCH_WEIGHT = 0.01
"""Its share of the engine beside others'."""
PORT = re.compile(r"\[([^\]]*)\](?::\d+)?|(\d+\.\d+\.\d+\.\d+):\d+")


class Address(str):
    """The address that a call came from, in the place of an owner. Many callers may be behind one, as behind a gateway."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, found once as it arrives."""

    key: Key | None = None
    """The API key, whose limits count; None where no keys are set."""
    tenant: str | None = None
    """Whom a trusted proxy names, where no keys are set."""
    address: str | None = None
    """The address that connected to the server: a gateway's, where one is in front."""
    forwarded_for: str | None = None
    """The end of X-Forwarded-For as it came to the server: the caller may have written it."""
    is_batch: bool = False
    """True if the call is a line of a batch, which others go before."""

    @property
    def owner(self) -> str | None:
        """In whose turn its requests run in the engine: its key's name, else its tenant. The lines of all batches are one
        owner's.
        """
        if self.is_batch:
            return BATCHES
        return self.tenant if self.key is None else self.key.name

    @property
    def turn(self) -> str | None:
        """In whose turn its body is read and its requests are prepared: the owner's, else the address's."""
        return self.owner or (None if self.address is None else Address(self.address))

    @property
    def weight(self) -> float:
        """The owner's share of the engine."""
        if self.is_batch:
            return BATCH_WEIGHT
        return 1.0 if self.key is None else self.key.share.weight

    def priority(self, requested_priority: int | None) -> int:
        """The priority of a call that asks for this one, or for none. Raises InvalidRequest where its key may not have it."""
        allowed = DEFAULT_PRIORITY if requested_priority is None else requested_priority
        if self.key is not None:
            allowed = self.key.priority(requested_priority)
        return 0 if self.is_batch else allowed

    def salt(self, own: str) -> str:
        """What cached prefixes are shared within. No group, key or tenant has a NUL in its name: nobody's own salt is
        another's.
        """
        if self.key is None:
            within = "" if self.tenant is None else f"tenant {self.tenant}"
        elif self.key.share.share_prefixes is None:
            within = f"key {self.key.name}"
        else:
            within = f"group {self.key.share.share_prefixes}"
        return f"{within}\0{own}"


NOBODY = Caller()
"""Whoever calls from inside this process."""


class Callers:
    """Finds who makes a call, but for the API key. `behind_edge`: our HAProxy is in front. Proxies and `header` name
    tenants.
    """

    def __init__(
        self,
        trusted_proxies: Sequence[Network] = (),
        header: str = FORWARDED,
        *,
        behind_edge: bool = False,
    ) -> None:
        self._trusted_proxies = tuple(trusted_proxies)
        self._trusts = lru_cache(4096)(self._is_trusted)
        self._header = header.lower()
        self._behind_edge = behind_edge

    def of(self, headers: Iterable[tuple[str, str]], peer: str | None) -> Caller:
        """The caller behind a call's headers or metadata, with names in lower case. `peer` is who connected to this process."""
        wanted = {FORWARDED, self._header} if self._trusted_proxies else {FORWARDED}
        found = [(name, value) for name, value in headers if name in wanted]
        told, address = ",".join(value for name, value in found if name == FORWARDED), peer
        if self._behind_edge and told:  # it adds the address that connected to it, as the last one
            told, _, address = told.rpartition(",")
        address = None if address is None else address.strip()[:MAX_FORWARDED]
        tenant = None
        if self._trusted_proxies and address and self._trusts(address):
            if self._header == FORWARDED:
                tenant = self._forwarded_address(told)
            else:
                tenant = _single([value for name, value in found if name == self._header])
        return Caller(None, tenant, address, told[-MAX_FORWARDED:] or None)

    def _forwarded_address(self, told: str) -> str | None:
        """The last address of X-Forwarded-For that is no trusted proxy's; None where something else comes first."""
        for _ in range(MAX_HOPS):
            told, _, last = told.rpartition(",")
            address = _address(last.strip())
            if address is None:
                return None
            if not self._trusts(text := str(address)):
                return text if TENANT.fullmatch(text) else None  # an address of IPv6 may have a zone of any characters
        return None

    def _is_trusted(self, address: str) -> bool:
        read = _address(address)
        return read is not None and any(read in network for network in self._trusted_proxies)


def _single(values: Sequence[str]) -> str | None:
    return values[0] if len(values) == 1 and TENANT.fullmatch(values[0]) else None


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """An address as proxies write it, with or without a port. One of IPv4 that is written as IPv6 is that of IPv4."""
    if (match := PORT.fullmatch(text)) is not None:
        text = match[1] or match[2] or ""
    try:
        read = ip_address(text)
    except ValueError:
        return None
    return getattr(read, "ipv4_mapped", None) or read


def networks(text: str) -> tuple[Network, ...]:
    """The addresses and networks of `trusted_proxies`, comma-separated. Raises ValueError that names what is neither."""
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            found.append(ip_network(part))
        except ValueError as error:
            raise ValueError(f"{part[:64]!r} is neither an address nor a network such as 10.0.0.0/8: {error}") from error
    return tuple(found)
