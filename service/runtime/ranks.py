"""The other ranks of a replica: Ray actors in its placement group. They end when it does, and it ends when one of them does."""

import logging
import os
from typing import Any

import ray

from attend.model.devices import choose_device
from attend.model.engine.build import build_runner, use_threads
from attend.model.engine.ranks import ShardRunner, run_worker_ranks
from attend.model.errors import DeviceFailed, EngineFailed
from attend.model.parallel.group import ProcessGroup
from attend.service.observe import logs
from attend.service.runtime.sizes import engine_options
from attend.service.settings import Settings

log = logging.getLogger("attend.rank")


@ray.remote(max_restarts=0)
class Rank:
    """A process with a part of the model."""

    def run(self, settings_json: str, rank: int, port: int) -> None:
        """Load the part, then compute what rank 0 sends. Raises what loading raises. Once all ranks are connected, the process
        ends with the first error, so that the others see its connections close.
        """
        settings = Settings.from_json(settings_json)
        logs.configure(settings.log_level, settings.log_format, settings.log_file)
        options = engine_options(settings)
        group = ProcessGroup(rank, settings.tensor_parallel, choose_device(options.device), port)
        try:
            runner = build_runner(settings.folder, options, group=group).runner
            assert isinstance(runner, ShardRunner)
            use_threads(options)
            run_worker_ranks(runner)
        except DeviceFailed as error:
            log.warning("rank %d ends: %s", rank, error)
        except Exception:
            log.exception("rank %d ends", rank)
            if not group.is_connected:
                raise
        logs.close()
        os._exit(1)


def start_ranks(settings: Settings) -> ProcessGroup:
    """The group of this replica, which is its rank 0; its other ranks load their parts. Ray puts them into the placement group
    of the replica, from which they are made.
    """
    actors: list[Any] = []
    runs: list[Any] = []

    def alive() -> None:
        """Raise why a rank has ended. Holds the actors: Ray ends those that nobody holds."""
        assert len(actors) == len(runs)
        for run in ray.wait(runs, timeout=0)[0]:
            ray.get(run)
            raise EngineFailed("a rank of the model has ended while it was loaded")

    group = ProcessGroup(0, settings.tensor_parallel, choose_device(settings.device), alive=alive)
    for rank in range(1, settings.tensor_parallel):
        actor = Rank.options(num_cpus=1, num_gpus=len(ray.get_gpu_ids())).remote()  # type: ignore[attr-defined]  # by ray.remote
        actors.append(actor)
        runs.append(actor.run.remote(settings.to_json(), rank, group.port))
    return group
