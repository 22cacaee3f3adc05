"""The profiles as locust knows them."""

import math
from typing import Any

from locust import LoadTestShape

from loadtest.profiles import PROFILES


class ProfileShape(LoadTestShape):
    """Follows a profile through `seconds`, up to `users` at most, and then ends the run."""

    abstract = True  # chosen by --shape; locust would take any other class that it finds
    use_common_options = True

    def __init__(self, name: str, users: int, seconds: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.profile, self.users, self.seconds = PROFILES[name], users, seconds

    def tick(self) -> tuple[int, float] | None:
        elapsed = self.get_run_time()  # type: ignore[no-untyped-call]
        if elapsed >= self.seconds:
            return None
        users = max(1, math.ceil(self.profile(elapsed / self.seconds) * self.users))
        return users, float(self.users)


def use_shape(environment: Any, name: str) -> None:
    """Have locust follow a profile. Raises SystemExit where the run has no end to measure it by."""
    options = environment.parsed_options
    if not options.run_time:
        raise SystemExit(f"--shape {name} needs --run-time: a shape is cut to the length of its run")
    shape = ProfileShape(name, options.num_users or 1, float(options.run_time))
    environment.shape_class, shape.runner = shape, environment.runner
