"""Two reports side by side: made-up ones whose difference is known."""

import json
import random

import pytest

from loadtest import compare

MACHINE = {"processor": "one", "cores": 2}


def making(seed=1, model="m", machine=MACHINE):
    return {"attend": "1", "seed": seed, "machine": machine, "servers": {"HTTP": {"model": model, "fingerprint": "f"}}}


def bench(**values):
    """A report of a benchmark with these figures, in tokens/s."""
    figures = [{"what": what, "unit": "tokens/s", "values": list(each)} for what, each in values.items()]
    return {"bench": "serve", "provenance": making(), "figures": figures}


def times(dice, count, scale):
    """A histogram of so many milliseconds around `scale`."""
    found = {}
    for _ in range(count):
        key = f"{scale * dice.lognormvariate(0, 0.2):.3g}"
        found[key] = found.get(key, 0) + 1
    return found


def load(seed=1, scale=10.0, answers=300, speed=100.0):
    """A report of a load: the first token and the gaps of so many answers, and six phases around a speed."""
    dice = random.Random(seed)
    measures = {"TTFT": times(dice, answers, scale), "ITL": times(dice, 20 * answers, scale), "TOTAL": {"500.0": answers}}
    phases = [
        {"users": at, "tokens_per_s": speed * at * dice.uniform(0.97, 1.03), "answers_per_s": 5.0 * at} for at in range(1, 7)
    ]
    counts = {"answers": answers, "failed": 0, "refused": 0}
    return {"provenance": making(seed), "load": {"loop": "open"}, "times": {"HTTP": measures}, "phases": phases} | counts


def files(tmp_path, *reports):
    """Where they lie; a load in the folder of its report."""
    for at, report in enumerate(reports):
        path = tmp_path / f"{at}.json"
        if "bench" not in report:
            path = tmp_path / str(at) / "summary.json"
            path.parent.mkdir()
        path.write_text(json.dumps(report))
        yield str(path if "bench" in report else path.parent)


def lines(a, b):
    return {line.what: line for line in compare.compare_reports(a, b)}


def test_a_speed_that_every_turn_shows_differs_and_noise_does_not():
    a, b = [100.0, 101, 99, 100, 102, 98], [121.0, 119, 120, 122, 118, 120]
    found = lines(bench(faster=a, same=a), bench(faster=b, same=list(reversed(a))))
    assert found["faster"].ratio == pytest.approx(1.2) and found["faster"].differs
    assert found["faster"].low == pytest.approx(1.2, abs=0.04) and found["faster"].low < 1.2 < found["faster"].high
    assert found["same"].low < 1 < found["same"].high and not found["same"].differs


def test_few_turns_have_no_interval_and_zero_is_no_divisor():
    found = lines(bench(few=[1.0, 2, 3, 4], none=[0.0] * 6), bench(few=[9.0, 9, 9, 9], none=[1.0] * 6))
    assert found["few"].ratio == pytest.approx(3.6) and found["few"].low is None and not found["few"].differs
    assert found["none"].ratio is None and found["none"].low is None
    assert found["none"].cells() == ("none", "tokens/s", "0", "1", "", "", "")


def test_a_slower_load_differs_in_its_percentiles_and_rates_and_another_seed_alone_does_not():
    slower, same = lines(load(1), load(2, scale=13.0, speed=80.0)), lines(load(1), load(2))
    for what in ("HTTP TTFT p50", "HTTP TTFT p95", "HTTP ITL p50"):
        assert slower[what].differs and slower[what].ratio == pytest.approx(1.3, rel=0.12)
        assert not same[what].differs
    assert slower["tokens_per_s"].differs and slower["tokens_per_s"].ratio == pytest.approx(0.8, rel=0.05)
    assert not same["tokens_per_s"].differs and not same["answers_per_s"].differs
    assert lines(load(answers=50), load(answers=50))["HTTP TTFT p99"].low is None


def test_the_gaps_of_an_answer_count_as_one_value():
    """The interval of gaps is as wide as that of as many first tokens, though there are twenty times as many gaps."""
    found = lines(load(1), load(2))
    widths = {name: found[f"HTTP {name} p50"].high - found[f"HTTP {name} p50"].low for name in ("TTFT", "ITL")}
    assert 0.5 < widths["ITL"] / widths["TTFT"] < 2


def test_the_command_prints_every_measure_and_says_what_the_makings_do_not_share(tmp_path, capsys):
    a, b = load(1), load(2, scale=20.0)
    b["provenance"] |= {"machine": MACHINE | {"cores": 64}}
    b["load"] |= {"loop": "closed"}
    compare.main([*files(tmp_path, a, b), "--json", str(tmp_path / "found.json")])
    out = capsys.readouterr().out
    assert "| HTTP TTFT p50 | ms |" in out and "| differs |" in out
    for sentence in ("seed: 1 in A, 2 in B", "machine, cores: 2 in A, 64 in B", "load, loop: 'open' in A, 'closed' in B"):
        assert f"not the same: {sentence}" in out
    assert "fingerprint" not in out and "processor" not in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["not_the_same"]) == 3 and any(line["differs"] for line in found["lines"])


OLD = {"load": {}, "transports": {}, "phases": []}
BAD = {
    "missing": (None, "cannot be read"),
    "not JSON": ("no {json", "is not JSON"),
    "not UTF-8": (b"\xff\xfe", "is not JSON"),
    "no report": (json.dumps([1, 2]), "is no report"),
    "of an older version": (json.dumps(OLD), "is no report"),
    "of another benchmark": (json.dumps(bench(x=[1.0]) | {"bench": "start"}), "A is a report of attend bench serve"),
    "of a load": (json.dumps(load()), "B one of a load"),
    "nothing in common": (json.dumps(bench(y=[1.0])), "no measure in common"),
    "figures that are none": (json.dumps(bench() | {"figures": [1]}), "is no report that Attend wrote"),
    "values that are none": (json.dumps(bench(x=["a", None])), "is no report that Attend wrote"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(tmp_path, capsys, case):
    text, reason = BAD[case]
    other = tmp_path / "other.json"
    if text is not None:
        other.write_bytes(text if isinstance(text, bytes) else text.encode())
    (good,) = files(tmp_path, bench(x=[1.0, 2.0]))
    with pytest.raises(SystemExit) as ended:
        compare.main([good, str(other)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and reason in error and error.count("\n") == 1
