"""The threads of a step: each piece of a phase is done once, before the next phase begins, however late a thread is."""

import subprocess

import pytest

from attend.model.net.native.build import find_compiler
from attend.model.net.native.library import SOURCE

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include "threads.h"

// argv: threads, phases, seed. Prints how many numbers were written other than once a phase, and how many threads took part.
int main(int, char** argv) {
    std::atomic<long> rests{0};
    static std::atomic<long>* rested = &rests;
    i64 threads = atol(argv[1]), phases = atol(argv[2]), wrong = 0;
    srand(atoi(argv[3]));
    std::vector<int> written(1000), took_part(threads);
    {
        Team team(threads, [] { rested->fetch_add(1); });
        for (i64 phase = 0; phase < phases; phase++) {
            i64 total = rand() % 1000, grain = 1 + rand() % 50, pause = rand() % 20 ? 0 : rand() % 300;
            std::fill(written.begin(), written.end(), 0);
            team.share(total, grain, [&](i64 begin, i64 end) {
                if (pause && begin / grain % 3 == phase % 3) usleep(pause);  // this thread has lost its core
                for (i64 n = begin; n < end; n++) written[n]++;
                took_part[Team::number()] = 1;
            });
            for (i64 n = 0; n < 1000; n++) wrong += written[n] != (n < total);
            if (rand() % 200 == 0) usleep(200);  // the others go to sleep
        }
    }
    long part = 0;
    for (int each : took_part) part += each;
    printf("%ld %ld %d\n", (long)wrong, part, rests.load() > 0);
}
"""


@pytest.mark.parametrize("flags", [("-O2",), ("-O1", "-fsanitize=thread")], ids=["plain", "thread sanitizer"])
def test_each_piece_is_done_once_before_the_next_phase(tmp_path, flags):
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "program.cpp").write_text(PROGRAM)
    command = [compiler, *flags, "-std=c++17", "-fopenmp", "-pthread", "-I", str(SOURCE), "program.cpp", "-o", "program"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if built.returncode and "sanitize" in flags[-1]:
        pytest.skip("this compiler has no thread sanitizer")
    assert not built.returncode, built.stderr
    for threads, phases in ((1, 300), (2, 3000), (5, 1500), (64, 60)):
        ran = subprocess.run(
            [tmp_path / "program", str(threads), str(phases), "1"], capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        wrong, took_part, rested = map(int, ran.stdout.split())
        assert wrong == 0
        assert took_part > 1 or threads == 1
        assert rested or threads == 1
