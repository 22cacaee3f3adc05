"""What Ray Serve builds of a configuration: variables are read as `attend serve` reads them, and told once."""

import warnings

import pytest

from attend.model.errors import SettingError

with warnings.catch_warnings():
    # Ray 2.60 declares its own fields in pydantic's old way; nothing of ours does.
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field` is deprecated")
    import ray

    from attend.service.runtime import hub
    from attend.service.runtime.deployment import application, build
    from attend.service.settings import Settings, read_settings


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.setattr(ray, "nodes", list)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("ATTEND_API_KEY_FILE", "keys", "did you mean ATTEND_API_KEYS_FILE"),
        ("ATTEND_API_KEYS_FILE", "", "ATTEND_API_KEYS_FILE, is empty"),
        ("ATTEND_KV_CACHE_MEMORY", "4XB", "512MiB or 2GB"),
    ],
)
def test_a_bad_variable_stops_an_application_too(monkeypatch, name, value, told):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=told):
        build({"replicas": 2})


def test_a_variable_that_nobody_reads_is_told_once_for_all_replicas(monkeypatch, caplog):
    monkeypatch.setenv("ATTEND_VERSION", "1")
    build({"replicas": 3, "kv_cache_memory": "64MiB"})
    assert caplog.messages == ["ATTEND_VERSION is not a setting, and is ignored"]
    application(read_settings({}))
    assert len(caplog.messages) == 1, "`attend serve` has told it already"


@pytest.mark.parametrize(("args", "hosts"), [({}, "*"), ({"allowed_hosts": "a.example"}, "a.example")])
def test_what_serve_listens_on_is_not_known_here_so_that_any_host_is_answered_unless_names_are_given(monkeypatch, args, hosts):
    """The default would be that of `host`, which Serve does not read: pods would refuse each other."""
    built = []
    monkeypatch.setattr("attend.service.runtime.deployment.application", built.append)
    build(args)
    assert [settings.allowed_hosts for settings in built] == [hosts]


def test_a_branch_of_the_hub_is_looked_up_once_for_all_replicas(monkeypatch):
    commit = "hf://org/tiny@" + "1" * 40
    monkeypatch.setattr(hub, "pin_revision", lambda settings, warn: settings.model_copy(update={"model": commit}))
    (settings,) = build({"model": "hf://org/tiny", "max_replicas": 2})._bound_deployment.init_args
    assert Settings.from_json(settings).model == commit
