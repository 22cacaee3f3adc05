"""The attention of the two backends that compute every model everywhere, by their names."""

from attend.model.net.backends import ReferenceBackend, TorchBackend

BACKENDS = {"reference": ReferenceBackend, "torch": TorchBackend}
