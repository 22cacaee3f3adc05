"""The attention of the two backends that compute every model everywhere, by their names."""

from attend.model.net.paged_attention import ReferenceBackend, TorchBackend

BACKENDS = {"reference": ReferenceBackend, "torch": TorchBackend}
