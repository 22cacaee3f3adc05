"""Scheduler overhead of a step, without a model: attend bench scheduler

Requests run at once in fake steps (no torch): schedule and commit, in microseconds of CPU time, and a line fitted through them.
"""

import statistics
import time

from attend.model.engine.config import EngineConfig
from attend.model.engine.plan import StepResult
from attend.model.engine.request import Request
from attend.model.engine.scheduler import Scheduler
from attend.model.params import SamplingParams
from loadtest.bench.figures import Figure, Report, options_of

STEPS = 200


def step_cost(running: int, steps: int = STEPS) -> float:
    """Median microseconds of a step's schedule and commit with so many requests that decode."""
    config = EngineConfig(max_model_len=1024, num_blocks=running * 64, max_batch_requests=running, max_batch_tokens=4 * running)
    scheduler = Scheduler(config, time.monotonic)
    for at in range(running):
        scheduler.add(Request(f"{at}", [at, 1, 2], 1000, SamplingParams(temperature=0)))
    costs = []
    for _ in range(steps):
        started = time.thread_time()
        plan = scheduler.schedule()
        between = time.thread_time()
        result = StepResult(tokens={item.request.request_id: 7 for item in plan.scheduled_tokens})
        after = time.thread_time()
        scheduler.commit(plan, result)
        costs.append(between - started + time.thread_time() - after)
    assert len(plan.scheduled_tokens) == running
    return statistics.median(costs[1:]) * 1e6


def main(words: list[str] | None = None) -> None:
    """Read the flags, print the table."""
    parser = options_of(__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256, 1024], help="requests at once")
    options = parser.parse_args(words)
    report, costs = Report(options.json, bench="scheduler"), []
    for size in options.running:
        costs.append(step_cost(size))
        report.add([Figure(f"a step of {size} requests", "us", (costs[-1],))])
    if len(set(options.running)) > 1:
        slope, fixed = statistics.linear_regression(options.running, costs)
        line = {"us a step": fixed, "us a request": slope}
        report.add(Figure(f"line through them: {what}", "us", (value,)) for what, value in line.items())


if __name__ == "__main__":
    main()
