import json

import pytest

from sparse_mla_verify.bench import (
    command,
)
from sparse_mla_verify.bench.grid import (
    CHECKPOINT,
)
from sparse_mla_verify.bench.results import (
    Run,
    Spread,
    load,
)
from sparse_mla_verify.peers.point import Point


def test_spread():
    spread = Spread.of([float(k) for k in range(11, 0, -1)])
    assert (spread.median, spread.low, spread.high) == (6.0, 2.0, 10.0)


def test_another_choice_replaces_ours(result_of):
    result = result_of(
        Point(1, 16, 0), ours=9.0, ours_wide=9.0, base=1.0, base_wide=2.0, baseline=3.0
    )
    host = {"run_sparse": 1.0, "run_sparse base": 2.0, "run_sparse low-latency": 3.0}
    run = Run({}, [result], [result], host).with_ours(lambda rows, heads: "base")
    for changed in (*run.results, *run.wide):
        assert changed.times_us == {
            "ours": 1.0, "ours_wide": 2.0, "base": 1.0, "base_wide": 2.0, "baseline": 3.0,
        }  # fmt: skip
        assert changed.notes == {"ours": "base"}
    assert run.host_us == host | {"run_sparse": 2.0}
    assert run.with_ours(lambda rows, heads: "base") == run


def test_the_json_has_the_agreed_form(tmp_path, result_of):
    path = tmp_path / "new" / "bench_latency.json"
    wide = [result_of(CHECKPOINT, ours_narrow=8.0, ours_wide=8.1)]
    run = Run(
        {"gpu": "a GPU", "driver": "1", "machine_code": {"b5": "ab"}},
        [result_of(Point(5, 96, 512), ours=2.0), result_of(CHECKPOINT, ours=1.23456, floor=0.5)],
        wide,
        {"run_sparse": {"median": 9.0, "low": 8.0, "high": 10.0}},
        [Point(1, 16, 0)],
    )
    run.save(path)
    plain = json.loads(path.read_text())
    assert {"gpu", "driver", "machine_code", "results"} <= set(plain)
    first = plain["results"][0]
    agreed = ("rows", "heads", "keys", "ours_us", "base_us", "flashmla_us", "floor_us")
    assert [first[key] for key in agreed] == [5, 96, 256, 1.235, None, None, 0.5]
    assert first["spread_us"]["floor"] == [0.4, 0.6]
    read = load(path)
    at_checkpoint = read.at(CHECKPOINT)
    assert at_checkpoint is not None
    assert at_checkpoint.times_us == {"ours": 1.235, "floor": 0.5}
    assert read.left_out == [Point(1, 16, 0)]
    assert read.wide[0].times_us == {"ours_narrow": 8.0, "ours_wide": 8.1}
    read.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="must be a benchmark's run"):
        load(tmp_path / "other.json")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"results": [{}], "wide": []}'])
def test_a_file_that_is_no_run_is_an_error(content, tmp_path, capsys):
    file = tmp_path / "run.json"
    file.write_text(content)
    assert command.main(["table", str(file)]) == 2
    assert "must be a benchmark's run" in capsys.readouterr().err


def test_times_that_are_none_are_refused(tmp_path, schedules_run, flat):
    file = tmp_path / "run.json"
    schedules_run(flat(base=float("nan"))).save(file)
    with pytest.raises(ValueError, match="must be finite and above 0"):
        load(file)
