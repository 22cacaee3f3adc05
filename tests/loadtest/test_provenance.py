"""What a report says of its own making."""

import json
import sys

from loadtest.provenance import identity, provenance


def test_a_report_says_who_when_how_and_where(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/attend bench serve", "--at-once", "1"])
    found = provenance(7, {"one": {"model": "m"}})
    assert (found["seed"], found["servers"]) == (7, {"one": {"model": "m"}})
    assert found["command"] == ["attend bench serve", "--at-once", "1"]
    assert found["when"][:2] == "20" and found["attend"]
    assert found["machine"]["processor"] and found["machine"]["cores"] >= 1 and found["machine"]["memory"] > 1 << 20
    assert json.loads(json.dumps(found)) == found
    assert identity("http://127.0.0.1:9")["model"] is None
