"""What processes find that load a model."""

import pytest

from attend.service.runtime import single, supervisor
from attend.service.runtime.files import ALLOCATOR, allocator
from attend.service.settings import Settings


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (*ALLOCATOR, *single.ENVIRONMENT):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_memory_of_a_gpu_grows_where_it_lies_with_ray_and_without(tmp_path, monkeypatch):
    assert allocator() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert allocator().items() <= supervisor.ray_environment(Settings(), tmp_path).items()
    monkeypatch.setattr(single, "raise_limit", lambda: None)
    single.prepare()
    assert single.os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("name", ALLOCATOR)
def test_what_the_user_says_to_the_allocator_stays(name, tmp_path, monkeypatch):
    """Under either name: torch would take the newer one."""
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert allocator() == {}
    assert not supervisor.ray_environment(Settings(), tmp_path).keys() & set(ALLOCATOR)
