"""Makes the caller identification from the settings."""

import logging

from attend.service.access.caller import Callers, networks
from attend.service.settings import Settings


def callers_of(settings: Settings) -> Callers:
    """What finds who calls. Says where a setting of tenants does nothing."""
    if settings.trusted_proxies and settings.api_keys_file:
        logging.getLogger("attend.tenants").warning("trusted_proxies name no tenants: callers are told apart by their API keys")
    trusted = () if settings.api_keys_file else networks(settings.trusted_proxies)
    behind_edge = settings.proxy == "haproxy" and not settings.single
    return Callers(trusted, settings.tenant_header, behind_edge=behind_edge)
