"""The owner of files and batches as text in the database, and back to a caller."""

from attend.service.access.caller import Caller
from attend.service.access.keys import KeyRing

KEY, TENANT = "key ", "tenant "
EVERYBODY = ""
"""Where neither keys nor tenants are known, all callers are one."""


def owner_of(caller: Caller) -> str:
    """The owner that a caller is."""
    if caller.key is not None:
        return f"{KEY}{caller.key.name}"
    return EVERYBODY if caller.tenant is None else f"{TENANT}{caller.tenant}"


def caller_of(owner: str, keys: KeyRing | None) -> Caller | None:
    """Who calls with the lines of this owner; None where its key is gone, or the server asks for keys now and had none."""
    if owner.startswith(KEY):
        key = None if keys is None else keys.find_by_name(owner.removeprefix(KEY))
        return None if key is None else Caller(key, is_batch=True)
    if keys is not None:
        return None
    return Caller(tenant=owner.removeprefix(TENANT) if owner.startswith(TENANT) else None, is_batch=True)
