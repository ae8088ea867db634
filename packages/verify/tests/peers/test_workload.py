import torch

from sparse_mla_verify.peers.point import Point
from sparse_mla_verify.peers.workload import (
    Pool,
    workload,
)

WIDTH = 64


def test_no_graph_reads_a_row_twice(pool):
    ids = pool.ids(4, 4, 64)
    assert ids.shape == (4, 4, 64)
    assert len(ids.unique()) == 1024
    assert pool.ids(2, 16, 64).shape == (2, 16, 64)  # more than there are: again from the start
    assert pool.ids(2, 3, 0).shape == (2, 3, 0)


def test_inputs_are_distinct_sets_of_finite_values(pool):
    assert not bool((pool.kv & 0x7F == 0x7F).any())
    work = workload(pool, Point(3, 16, 8), WIDTH, sets=4)
    assert work.query.shape == (4, 3, 16, 576)
    assert work.rows.shape == (4, 3, WIDTH)
    assert bool((work.rows[..., 8:] == -1).all())
    assert work.valid.tolist() == [8, 8, 8]
    assert not torch.equal(work.query[0], work.query[1])
    again = workload(Pool("cpu", rows=1024), Point(3, 16, 8), WIDTH, sets=4)
    assert torch.equal(again.query, work.query)
    assert torch.equal(again.rows, work.rows)
    wide = work.widened(80, 70)
    assert (wide.width, wide.peer_width, wide.rows[0, 0, 7]) == (80, 70, work.ids[0, 0, 7])
