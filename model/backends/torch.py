"""The torch backend: matrix products and fused attention of torch, for every model on every device."""

from functools import cached_property

from attend.model.backends.backend import Backend
from attend.model.net.paged_attention import TorchBackend


class Torch(Backend):
    """What serves where no faster backend can."""

    name = "torch"

    @cached_property
    def attention(self) -> TorchBackend:
        """See Backend."""
        return TorchBackend(self.config.attention_variants)
