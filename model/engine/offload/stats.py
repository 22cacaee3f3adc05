"""Counters of KV offloading."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """KV offloading to disk: counts since the start, and what is there."""

    num_bytes: int
    """Bytes of the folder's files, those of other processes and models too."""
    read_tokens: int
    """Tokens that were not computed, since their blocks were read back."""
    read_bytes: int
    written_bytes: int
    dropped_texts: int
    """Ended requests of which not all was written: blocks evicted before, too many texts at once, an error of the disk."""
    num_slower: int
    """Requests whose prefix was there and was computed, since reading would have taken longer, or did."""
    num_errors: int
    """Files and records that were no good, and failures of the disk."""
