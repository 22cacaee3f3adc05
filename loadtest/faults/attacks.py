"""All attacks of one caller on the others. The modules below put them into ATTACKS, each with others of its kind."""

from loadtest.faults import answers, bodies, rpc, wire
from loadtest.faults.attack import ATTACKS

__all__ = ["ATTACKS", "answers", "bodies", "rpc", "wire"]
