"""Limits of gRPC callers: message size, health watches."""

from attend.service.records import bytes_for

MAX_MESSAGE = 4 << 20
"""Bytes of a caller's message, where the model's context is not so long that it needs more: see `most_bytes`."""
MAX_WATCHES = 256
"""Open health watches of a replica: they need no key, and never end by themselves."""


def most_bytes(max_model_len: int) -> int:
    """Bytes of a caller's message, for a model with this context."""
    return bytes_for(max_model_len, MAX_MESSAGE)
