"""The file of `--models`: each error names the file, the entry and the field."""

import tempfile
from pathlib import Path

import pytest

from attend.model.errors import AttendError
from attend.service.runtime.models.entries import PROCESS_BYTES, read_plan, weight_bytes
from attend.service.runtime.models.run import folder_of_sockets
from attend.service.settings import Settings, read_settings

GIB = 1 << 30


def plan_of(folder: Path, text: str, free: int = 10 * GIB, **flags):
    path = folder / "models.yaml"
    path.write_text(text)
    return read_plan(read_settings(flags | {"models": str(path)}, {}), free)


def test_a_file_says_names_settings_and_limits(tmp_path):
    plan = plan_of(
        tmp_path,
        """
        memory_budget: 4GiB
        idle_seconds: 60
        default: small
        models:
        - {name: first, memory: 512MiB, pin: true, settings: {max_model_len: 128, dtype: float32}}
        - {name: small, settings: {adapter: [tone=/lora/tone, code=/lora/code]}}
        """,
        num_threads="1",
        dtype="bfloat16",
    )
    assert (plan.budget, plan.file.idle_seconds, plan.default) == (4 * GIB, 60.0, "small")
    first, small = plan.models.values()
    assert (first.entry.pin, first.entry.memory, first.settings.name) == (True, 512 << 20, "first")
    assert (first.settings.max_model_len, first.settings.dtype, first.settings.num_threads) == (128, "float32", 1)
    assert small.settings.dtype == "bfloat16", "settings of the command line are those of each model"
    assert small.has_adapter("tone") and not small.has_adapter("small")
    assert not small.entry.pin


def test_without_limits_nine_tenths_of_the_free_memory_may_be_taken_and_the_first_model_is_the_default(tmp_path):
    plan = plan_of(tmp_path, "models: [{name: a}, {name: b}]")
    assert (plan.budget, plan.default) == (9 * GIB, "a")


def test_a_model_that_was_never_loaded_counts_for_its_files_and_its_cache(tmp_path):
    plan = plan_of(tmp_path, "models: [{name: a}, {name: b, settings: {kv_cache_memory: 1GiB}}, {name: c, memory: 7}]")
    a, b, c = plan.models.values()
    files = weight_bytes(a.settings)
    assert 1 << 20 < files < 1 << 30
    assert b.expected_memory(plan.budget) == PROCESS_BYTES + files + GIB
    assert a.expected_memory(plan.budget) == PROCESS_BYTES + files + plan.budget // 10
    assert c.expected_memory(plan.budget) == 7


def test_adapters_of_a_folder_are_found_by_name(tmp_path):
    (tmp_path / "lora" / "tone").mkdir(parents=True)
    served = plan_of(tmp_path, f"models: [{{name: a, settings: {{adapters_folder: {tmp_path / 'lora'}}}}}]").models["a"]
    assert [served.has_adapter(name) for name in ("tone", "other", ".", "..", "../lora/tone", "", "a" * 5000, "\0")] == [
        True
    ] + [False] * 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: [", "is not YAML"),
        ("models: [{name: a}]\nmodels: []", "the key 'models' is there twice: line 1"),
        ("models: [{name: a, name: b}]", "the key 'name' is there twice"),
        ("- name: a", "it = "),
        ("{}", "models is missing"),
        ("models: []", "models = "),
        ("models: [a]", "models[0] = 'a' (string) cannot be used"),
        ("models: [{model: x}]", "models[0].name is missing"),
        ("models: [{name: 5}]", "models[0].name = 5 (integer) cannot be used"),
        ("models: [{name: ''}]", "models[0] (''): name must be 1 to 256 printable characters"),
        ("models: [{name: a}, {name: a}]", "models[1] ('a'): another model has this name"),
        ("models: [{name: a, pinned: true}]", "models[0].pinned is not a field"),
        ("models: [{name: a, pin: sometimes}]", "models[0].pin = 'sometimes' (string) cannot be used"),
        (
            "models: [{name: a, memory: lots}]",
            "models[0].memory = 'lots' (string) cannot be used: it must be a number of",
        ),
        ("models: [{name: a, memory: 0}]", "models[0].memory = 0 (integer) cannot be used"),
        ("memory_bugdet: 1GiB\nmodels: [{name: a}]", "memory_bugdet is not a field: did you mean memory_budget?"),
        ("memory_budget: -1\nmodels: [{name: a}]", "memory_budget = -1 (integer) cannot be used"),
        ("idle_seconds: .nan\nmodels: [{name: a}]", "idle_seconds = nan (number) cannot be used"),
        ("default: b\nmodels: [{name: a}]", "default = 'b' is none of the models"),
        (
            "models: [{name: a, settings: {max_model_length: 9}}]",
            "settings.max_model_length is not a setting: did you mean max_model_",
        ),
        ("models: [{name: a, settings: {max_model_len: 9}}]", "models[0] ('a'): max_model_len = '9' cannot be used"),
        ("models: [{name: a, settings: {port: 9}}]", "settings.port is no setting of one model"),
        ("models: [{name: a, settings: {replicas: 2}}]", "settings.replicas is no setting of one"),
        ("models: [{name: a, settings: {served_model_name: x}}]", "settings.served_model_name is no setting of one"),
        ("models: [{name: a, settings: 5}]", "models[0].settings = 5 (integer) cannot be used"),
        ("models: [{name: a, model: /no/such/folder}]", "models[0] ('a'): /no/such/folder does not exist"),
        ("models: [{name: a, model: 'hf://one'}]", "models[0] ('a'): model = 'hf://one' cannot be used"),
        ("models: [{name: a, settings: {adapter: 'b=/x'}}, {name: b}]", "the adapter 'b' of 'a' has the name of a model"),
        (
            "models: [{name: a, settings: {adapter: 'c=/x'}}, {name: b, settings: {adapter: 'c=/y'}}]",
            "the adapter 'c' of 'b' has the name of an adapter of 'a'",
        ),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_in_a_sentence_that_names_the_field(tmp_path, text, words):
    with pytest.raises(AttendError) as caught:
        plan_of(tmp_path, text)
    assert words in str(caught.value)
    assert str(tmp_path / "models.yaml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(AttendError, match=r"models '.*none.yaml' cannot be read: No such file"):
        read_plan(Settings(models=str(tmp_path / "none.yaml")))
    (tmp_path / "models.yaml").write_bytes(b"\xff\x00")
    with pytest.raises(AttendError, match="is not YAML"):
        read_plan(Settings(models=str(tmp_path / "models.yaml")))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"replicas": "2"}, "each model is one replica on this machine, and replicas = 2 needs Ray"),
        ({"tensor_parallel": "2"}, "tensor_parallel = 2 needs Ray"),
        ({"model": "/x"}, "it has model for each model: leave model out here"),
        ({"adapter": "a=/x"}, "leave adapter out here"),
    ],
)
def test_flags_that_contradict_the_file_are_refused_by_name(flags, words):
    with pytest.raises(AttendError, match=words):
        read_settings({"models": "models.yaml", **flags}, {})


def test_no_folder_for_sockets_stops_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(AttendError, match="no folder can be made"), folder_of_sockets():
        pass


def test_the_example_can_be_read():
    path = Path(__file__).parents[4] / "deploy" / "models" / "models.yaml"
    plan = read_plan(Settings(models=str(path)), 10 * GIB)
    assert list(plan.models) == ["code", "small-chat", "long-chat"]
    assert (plan.default, plan.models["code"].entry.pin, plan.budget) == ("code", True, 6 * GIB)
    assert plan.models["long-chat"].expected_memory(plan.budget) <= plan.budget - plan.models["code"].expected_memory(
        plan.budget
    )
