"""The benchmark of LoRA adapters: what it writes is read, and its streams compute with what they were given."""

from loadtest.bench.lora import Case, measure, write_adapter
from tests.model.checkpoints import write_checkpoint


def test_each_stream_draws_a_token_a_step_with_the_adapter_whose_turn_it_is(tmp_path):
    model = write_checkpoint("llama", tmp_path / "model")
    folders = [write_adapter(model, tmp_path / str(n), 4, n) for n in range(2)]
    cases = {"none": Case(model, None, 3, 1, "torch"), "two": Case(model, folders, 3, 1, "torch")}
    streams = list(cases["two"].engine.scheduler._by_id.values())
    assert [streams[0].adapter, streams[1].adapter] == [streams[2].adapter, streams[1].adapter]
    assert len({stream.adapter.digest for stream in streams}) == 2
    lengths = [stream.num_tokens for stream in streams]
    found = measure(cases, turns=3)
    assert {each.what: len(each.values) for each in found} == {"a step, none": 3, "a step, two": 3, "a step, two / none": 3}
    assert {stream.num_tokens - before for stream, before in zip(streams, lengths, strict=True)} == {4}, "a turn warms up"
