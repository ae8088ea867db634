"""Apart from the other tests of push mode: the processes import this file, so it is a light one."""

import sys
import time

import pytest

from sparse_mla_verify.push.group import Job, run_processes


def _one_hangs(job, rank):
    if rank:
        time.sleep(60)


def _one_fails(job, rank):
    if rank:
        sys.exit(3)


@pytest.mark.parametrize(
    ("target", "seconds", "says"),
    [(_one_hangs, 3.0, "rank 1 was still running"), (_one_fails, 120.0, "rank 1 ended with 3")],
)
def test_processes_are_ended_in_time(tmp_path, target, seconds, says):
    wrong = run_processes(target, Job(2, 1, 1, 1, False, tmp_path), seconds)
    assert any(says in text for text in wrong)
