"""The reference backend: the equations, request by request in float32; slow, and right by inspection."""

from functools import cached_property

from attend.model.backends.backend import Backend
from attend.model.net.paged_attention import ReferenceBackend


class Reference(Backend):
    """What all others are compared with."""

    name = "reference"

    @cached_property
    def attention(self) -> ReferenceBackend:
        """See Backend."""
        return ReferenceBackend(self.config.attention_variants)
