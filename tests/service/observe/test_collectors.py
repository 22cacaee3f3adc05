"""Histograms of one thread show what prometheus_client's own would show."""

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as SharedHistogram

from attend.service.observe.collectors import Histogram
from attend.service.observe.metrics import STEP_SECONDS, TOKENS
from tests.conftest import examples

LABELS = {"model": 'a "name"\\'}


@settings(max_examples=examples(100), derandomize=True, deadline=None)
@given(values=st.lists(st.floats(0, 700) | st.sampled_from(STEP_SECONDS) | st.sampled_from(TOKENS), max_size=20))
def test_a_histogram_counts_as_the_shared_one_does(values):
    for buckets in (STEP_SECONDS, TOKENS):
        ours, theirs = CollectorRegistry(), CollectorRegistry()
        tally = Histogram("attend_x", "About x", LABELS, buckets, ours)
        shared = SharedHistogram("attend_x", "About x", ["model"], buckets=buckets, registry=theirs).labels(**LABELS)
        for value in values:
            tally.observe(value)
            shared.observe(value)
        assert generate_latest(ours) == generate_latest(theirs)
