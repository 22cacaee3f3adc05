"""Ids of tool calls."""

import hashlib

SHORT = 9
"""Letters and digits of an id: the templates of Mistral take no other."""


def call_id(*about: object) -> str:
    """An id made of what tells a call from every other: the same for the same call, so that nothing has to be kept.

    Nine letters and digits, which every template takes.
    """
    digest = hashlib.blake2s(repr(about).encode(), digest_size=8).digest()
    number, digits = int.from_bytes(digest, "big"), []
    for _ in range(SHORT):
        number, digit = divmod(number, 36)
        digits.append("0123456789abcdefghijklmnopqrstuvwxyz"[digit])
    return "".join(digits)
