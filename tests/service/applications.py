"""A private Ray with HAProxy and the applications of a Serve configuration: `-m tests.service.applications FILE HTTP GRPC`.

Prints a line once all of them serve, and ends with its standard input.
"""

import asyncio
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from attend.service.runtime.ports import claim
from attend.service.runtime.supervisor import ray_environment
from attend.service.settings import read_settings


async def main(applications: list[dict[str, Any]], http: int, rpc: int) -> None:
    """Serve until standard input ends."""
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions, gRPCOptions

    from attend.service.runtime.deployment import build
    from attend.service.runtime.driver import OBJECT_STORE, SERVICERS, without_helpers

    without_helpers()
    ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE, log_to_driver=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        http_options=HTTPOptions(host="127.0.0.1", port=http),
        grpc_options=gRPCOptions(port=rpc, grpc_servicer_functions=SERVICERS),
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    for each in applications:
        served = build(each["args"] | {"drain_seconds": 1})
        await asyncio.to_thread(serve.run, served, name=each["name"], route_prefix=each["route_prefix"])
    print("Ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await serve.shutdown_async()
    ray.shutdown()


if __name__ == "__main__":
    http_port, grpc_port = map(int, sys.argv[2:])
    ports, lock = claim(http_port, grpc_port)
    with lock, tempfile.TemporaryDirectory() as private:
        settings = read_settings({"host": "127.0.0.1", "port": http_port, "grpc_port": grpc_port})
        variables = ray_environment(settings, Path(private)) | ports
        os.environ.update({name: value for name, value in variables.items() if value or not name.startswith("ATTEND_")})
        asyncio.run(main(yaml.safe_load(Path(sys.argv[1]).read_text())["applications"], http_port, grpc_port))
