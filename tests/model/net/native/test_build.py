"""The native decoder is built once into the user's cache, and never loaded from where other users can write."""

import os
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from attend.model.net.native import build as building
from attend.model.net.native import library
from attend.model.net.native.__main__ import main
from attend.model.net.native.build import absence, find_compiler, provide

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source of one line, which is nowhere built."""
    folder = tmp_path / "package/source"
    folder.mkdir(parents=True)
    (folder / "decoder.cpp").write_text('extern "C" int attend() { return 1; }')
    for module in (library, building):
        monkeypatch.setattr(module, "SOURCE", folder)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/attend"


@pytest.fixture
def opened(monkeypatch):
    """The paths that `load` tries, none of which can be loaded."""
    tried = []

    def refuse(path):
        tried.append(path)
        raise OSError

    monkeypatch.setattr(library, "open_library", refuse)
    return tried


def told():
    said = []
    provide(said.append)
    return said


@needs_compiler
def test_it_is_built_once_and_two_lines_say_so(source, cache):
    first, last = told()
    assert first.startswith("Building the native decoder, once: about ")
    assert last.startswith(f"Built {cache / library.library_name()} in ")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {path.name for path in cache.iterdir()} == {library.library_name(), "lock"}
    assert told() == []


def test_at_set_up_it_is_built_beside_its_source_and_replaces_an_older_one(source, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: open(command[-1], "w").close())
    monkeypatch.setattr(building, "find_compiler", lambda: "c++")
    (source.parent / "decoder-0123.so").touch()
    assert main() == 0
    assert list(source.parent.glob("*.so")) == [library.library_path()]
    assert str(library.library_path()) in capsys.readouterr().out
    (source / "matrix.h").write_text("// changed")
    assert not library.library_path().exists()


@needs_compiler
def test_processes_that_start_together_build_it_once(source, cache):
    said = []
    threads = [threading.Thread(target=provide, args=(said.append,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 2


@needs_compiler
def test_one_beside_the_source_that_cannot_be_loaded_here_is_replaced_by_one_in_the_cache(source, cache, opened):
    library.library_path().write_text("built for another machine")
    assert len(told()) == 2
    assert library.load_library.__wrapped__() is None
    assert opened == [library.library_path(), cache / library.library_name()]


@needs_compiler
def test_the_cache_keeps_the_newest_libraries_of_other_versions(source, cache):
    cache.mkdir(parents=True, mode=0o700)
    for age in range(5):
        (cache / f"decoder-{age}.so").touch()
        os.utime(cache / f"decoder-{age}.so", (1000 - age, 1000 - age))
    told()
    assert {path.name for path in cache.glob("*.so")} == {library.library_name(), "decoder-0.so", "decoder-1.so"}


@needs_compiler
def test_a_source_that_does_not_compile_is_told_in_the_compilers_words(source, cache):
    (source / "decoder.cpp").write_text("this is no C++")
    _, failed = told()
    assert failed.startswith("The native decoder cannot be built: ") and "error" in failed and "\n" not in failed
    assert absence()[0] == "not_built"
    assert {path.name for path in cache.iterdir()} == {"lock"}


def test_without_a_compiler_nothing_is_begun(source, cache, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert told() == []
    assert not cache.exists()
    assert absence() == ("no_compiler", "it was not built: install g++, and start again")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777], ids=oct)
def test_nothing_is_loaded_or_built_where_others_can_write(source, cache, opened, monkeypatch, mode):
    monkeypatch.setattr(building, "find_compiler", lambda: "c++")
    cache.mkdir(parents=True)
    (cache / library.library_name()).touch()
    cache.chmod(mode)
    assert told() == []
    assert library.load_library.__wrapped__() is None
    assert opened == [library.library_path()]
    reason, why = absence()
    assert reason == "no_cache"
    assert why.startswith(f"it was not built: {cache} is not a folder that only this user can write to (chmod 700); ")


def test_nothing_is_loaded_from_a_folder_that_others_could_replace(source, cache):
    cache.mkdir(parents=True, mode=0o700)
    cache.parent.chmod(0o777)
    with pytest.raises(OSError, match=f"other users could replace .*: {cache.parent} is another user's, or others can"):
        library.cached_path()
    cache.parent.chmod(0o1777)
    assert library.cached_path().parent == cache


def test_nothing_is_loaded_from_another_users_folder_or_through_a_link(source, cache, tmp_path, monkeypatch):
    cache.mkdir(parents=True, mode=0o700)
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(OSError, match="only this user"):
            library.cached_path()
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="only this user"):
        library.cached_path()


@pytest.mark.parametrize("chosen", ["", "relative", "./.cache"])
def test_the_cache_is_never_in_the_current_folder(tmp_path, monkeypatch, chosen):
    monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library.cache_folder() == tmp_path / ".cache/attend"
    monkeypatch.setenv("HOME", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "home", lambda: Path("relative"))
    with pytest.raises(OSError, match="is not absolute: set HOME or XDG_CACHE_HOME"):
        library.cache_folder()
