"""How the load goes through a run: the share of --users at each share of --run-time, both 0 to 1."""

import math

STEPS = 5


def ramp(share: float) -> float:
    """From nothing to everything, evenly."""
    return share


def spike(share: float) -> float:
    """A fifth of the load, with all of it in the middle fifth of the time."""
    return 1.0 if 0.4 <= share < 0.6 else 0.2


def soak(share: float) -> float:
    """All of the load after a rise in the first twentieth; made for hours."""
    return min(1.0, share * 20)


def steps(share: float) -> float:
    """Five equal steps, each long enough to be a point of latency against load."""
    return min(STEPS, math.floor(share * STEPS) + 1) / STEPS


PROFILES = {"ramp": ramp, "spike": spike, "soak": soak, "steps": steps}
