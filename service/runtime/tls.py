"""TLS of one process, with renewal of its certificate; under Ray Serve HAProxy and `certificate_renewal.py` do this."""

import logging

import grpc

from attend.service.runtime.certificate_renewal import BadPair, Complaint, context, expiry, load_pair, pair

log = logging.getLogger("attend.tls")


class Certificate:
    """The certificate of both transports. Connections that are open keep the one that they began with. Raises BadPair."""

    def __init__(self, cert: str, key: str) -> None:
        self._places = cert, key
        self._loaded = pair(cert, key)
        self._complaint = Complaint(log.error)
        self.expiry = expiry(self._loaded)
        """When the certificate in use ends, in seconds since 1970."""
        self.context = load_pair(context(), self._loaded)
        """For HTTP: new connections use what it has loaded last."""
        self.credentials = grpc.dynamic_ssl_server_credentials(self._configuration(), self._configuration)
        """For gRPC, which asks for the configuration at each new connection."""

    def renew(self) -> None:
        """Look at the files, and load them where they have changed. Bad ones leave the last good ones in use, and are told."""
        try:
            if (fresh := pair(*self._places)) != self._loaded:
                load_pair(self.context, fresh)
                self._loaded, self.expiry = fresh, expiry(fresh)
                log.info("new connections use the new certificate")
            self._complaint.end()
        except (BadPair, OSError) as error:
            self._complaint.make(str(error))

    @property
    def is_ok(self) -> bool:
        """True if the certificate in use is that of the files."""
        return not self._complaint.text

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self._loaded, self._loaded)])
