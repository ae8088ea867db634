"""What several tests of peers share: a small cache on the CPU."""

import pytest

from sparse_mla_verify.peers.workload import Pool


@pytest.fixture(scope="module")
def pool():
    return Pool("cpu", rows=1024)
