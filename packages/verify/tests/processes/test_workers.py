import os
import subprocess
import sys

import pytest

from sparse_mla_verify.processes.workers import (
    THREADS,
    kept,
    one_thread_each,
    spread,
)


def _process_and_threads(k: int) -> tuple[int, int, list[str | None]]:
    return k, os.getpid(), [os.environ.get(name) for name in THREADS]


def test_processes_have_one_thread_each_and_this_one_is_left_as_it_was(monkeypatch):
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    found = dict(spread(_process_and_threads, [(k,) for k in range(4)], 2))
    assert [found[k][0] for k in range(4)] == [0, 1, 2, 3]
    assert os.getpid() not in {pid for _, pid, _ in found.values()}
    assert {tuple(threads) for *_, threads in found.values()} == {("1",) * len(THREADS)}
    assert not any(name in os.environ for name in THREADS)


@pytest.mark.parametrize(("tasks", "workers"), [(3, 1), (1, 2), (0, 2)])
def test_what_needs_one_process_is_done_in_this_one(tasks, workers):
    found = dict(spread(_process_and_threads, [(k,) for k in range(tasks)], workers))
    assert {pid for _, pid, _ in found.values()} <= {os.getpid()}
    assert found.keys() == set(range(tasks))


def test_the_users_own_number_of_threads_stays(monkeypatch):
    monkeypatch.setenv(THREADS[0], "3")
    with one_thread_each():
        assert os.environ[THREADS[0]] == "3"
    assert os.environ[THREADS[0]] == "3"


def test_kept_processes_are_the_same_for_all_work(monkeypatch):
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    tasks = [(k,) for k in range(6)]
    with kept(2):
        found = [one for _ in range(3) for _, one in spread(_process_and_threads, tasks, 2)]
        assert dict(spread(_process_and_threads, tasks[:1], 2))[0][1] == os.getpid()
    assert len(found) == 18
    assert len({pid for _, pid, _ in found}) <= 2
    assert {tuple(threads) for *_, threads in found} == {("1",) * len(THREADS)}
    after = {pid for _, (_, pid, _) in spread(_process_and_threads, tasks, 2)}
    assert not after & {pid for _, pid, _ in found}
    with kept(1):
        assert not any(name in os.environ for name in THREADS)


ENDS_AT_ONCE = """
import os
from sparse_mla_verify.processes.workers import kept, spread
if __name__ == "__main__":
    with kept(2):
        print(*{pid for _, pid in spread(os.getpid, [()] * 4, 2)}, flush=True)
        os._exit(0)
"""


def test_processes_end_with_the_one_that_started_them(tmp_path):
    """All of them hold the pipe that is read to its end here."""
    script = tmp_path / "ends_at_once.py"
    script.write_text(ENDS_AT_ONCE)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    )
    assert done.stdout.split()
