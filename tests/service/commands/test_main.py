"""Ctrl-C ends every command with status 130 and without a traceback, from the first moment."""

import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

BEGIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background has it ignored
from attend.service.commands import main
"""
HANG = f"""{BEGIN}
import builtins, time
load, wanted = builtins.__import__, sys.argv[1]

def slowly(name, *rest, **more):
    if name == wanted:
        try:
            print("here", flush=True)
            time.sleep(60)
        except BaseException:
            pass  # as modules do that can do without another one
    return load(name, *rest, **more)

builtins.__import__ = slowly
sys.argv = ["attend", *sys.argv[2:]]
main.main()
"""
BENCHMARK = """
import time

def main():
    try:
        print("here", flush=True)
        time.sleep(60)
    finally:
        print("put away", flush=True)
"""
RUN_BENCHMARK = f"""{BEGIN}
from pathlib import Path
from attend.service.commands import bench
bench.FOLDER = Path(sys.argv[1])
sys.path.insert(0, sys.argv[1])
import sleeps
sys.modules["loadtest.bench.sleeps"] = sleeps
sys.argv = ["attend", "bench", "sleeps"]
main.main()
"""


@contextmanager
def interrupted(code, *words):
    """(status, standard output, standard error) of a program that is interrupted where it says `here`."""
    command = [sys.executable, "-c", code, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "here\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            yield process.returncode, out, err
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("attend.service.commands.cli", ["generate", "x"]),
        ("attend.model.engine.build", ["generate", "x"]),
        ("torch", ["inspect"]),
        ("grpc", ["check", "localhost:1"]),
        ("attend.service.runtime.supervisor", ["serve"]),
        ("attend.service.runtime.single", ["serve", "--single"]),
    ],
)
def test_ctrl_c_during_an_import_is_neither_swallowed_nor_a_traceback(module, words):
    with interrupted(HANG, module, *words) as ended:
        assert ended == (130, "", "")


def test_a_command_that_puts_something_away_does_so_and_ends_with_the_same_status(tmp_path):
    """As a benchmark ends the servers that it has started."""
    (tmp_path / "sleeps.py").write_text(BENCHMARK)
    with interrupted(RUN_BENCHMARK, str(tmp_path)) as ended:
        assert ended == (130, "put away\n", "")


def test_a_command_whose_caller_ignores_ctrl_c_ignores_it_too():
    """A shell starts background jobs so."""
    code = f"{BEGIN}\nsignal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv = ['attend', '--version']\n"
    code += "try: main.main()\nexcept SystemExit: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("True\n")
