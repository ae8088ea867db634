from pathlib import Path
from typing import Any

import pytest

import sparse_mla_kernel.host.policy as kernel_policy
from sparse_mla_kernel import parse_schedules, parse_table
from sparse_mla_verify.bench import (
    command,
    grid,
    policy_tables,
)
from sparse_mla_verify.bench.grid import (
    CHECKPOINT,
    QUICK,
)
from sparse_mla_verify.bench.results import (
    SCHEDULES,
    load,
)
from sparse_mla_verify.inputs.schedules import kernel_schedule
from sparse_mla_verify.peers.point import Point


def test_a_policy_follows_from_a_run(grid_run):
    assert policy_tables.table_text(grid_run(), max_keys=2048) == "1-16:sparse"
    none = grid_run(wins=lambda point: False)
    assert policy_tables.table_text(none, max_keys=2048) == "1-16:split"
    # One lost point is a lost batch size, and so are the unmeasured ones on either side of it.
    text = policy_tables.table_text(grid_run(wins=lambda p: p != Point(8, 16, 512)), max_keys=2048)
    assert text == "1-6:sparse,7-15:split,16:sparse"
    assert parse_table(text)[7] == "split"
    assert (
        policy_tables.table_text(grid_run(wins=lambda p: p.keys <= 512), max_keys=512)
        == "1-16:sparse"
    )
    assert (
        policy_tables.table_text(grid_run(ours=1.0), max_keys=2048) == "1-16:split"
    )  # equal is no win


def test_a_policy_needs_the_whole_grid(grid_run):
    with pytest.raises(ValueError, match="times of ours and flashmla, got none at 1 x 16 x 0"):
        policy_tables.table_text(grid_run(points=QUICK), max_keys=2048)
    with pytest.raises(ValueError, match="must have times of ours and other"):
        policy_tables.table_text(grid_run(), max_keys=2048, peer="other")
    with pytest.raises(ValueError, match="max_keys must be 0 or more, got -1"):
        policy_tables.table_text(grid_run(), max_keys=-1)


def test_a_shapes_schedule_has_the_least_mean(schedules_run):
    def times(p):
        small = p.rows * p.heads < 500
        # At 16 heads and 16 rows: 9 of 8 points slower by 1.2, the last faster by 4.
        mean = {"low-latency-2": 0.2 if p.keys == 2048 else 0.96, "low-latency-4": 0.8}
        odd = mean if (p.rows, p.heads) == (16, 16) else {}
        return {"base": 2.0, "low-latency": 0.5 if small else 1.5, "low-latency-4": 1.0} | odd

    run = schedules_run(times)
    lines = policy_tables.schedules_text(run, max_keys=2048)
    assert lines == [
        "1-16x16:low-latency",
        "1-6x64:low-latency,7-16x64:low-latency-4",
        "1-5x96:low-latency,6-16x96:low-latency-4",
        "1-3x128:low-latency,4-16x128:low-latency-4",
    ]
    table = ",".join(lines)
    pick = policy_tables.chosen_by(table)
    # Sizes between measured ones are as the next larger, by the kernel's rule too.
    assert [pick(7, 64), pick(3, 112), pick(4, 112), pick(17, 256)] == [
        "low-latency-4", "low-latency", "low-latency-4", "low-latency-4",
    ]  # fmt: skip


def test_a_schedule_behind_the_peer_at_fewer_points_comes_before_one_with_less_mean(schedules_run):
    def times(p):
        # Behind a peer of 1.0 at 1, 2 and all of a shape's 8 key counts.
        slow = {"base": p.keys == 2048, "low-latency": p.keys >= 1024, "low-latency-2": True}
        fast = {"base": 0.9, "low-latency": 0.1, "low-latency-2": 0.05}
        return {name: 1.0 if slow[name] else fast[name] for name in slow}

    run = schedules_run(times)
    assert policy_tables.schedules_text(run, max_keys=2048)[0] == "1-16x16:base"
    # Up to 1024 keys base is behind nowhere, the others still are.
    assert policy_tables.schedules_text(run, max_keys=1024)[0] == "1-16x16:base"
    # Of 512 keys at most two are never behind: the mean decides.
    assert policy_tables.schedules_text(run, max_keys=512)[0] == "1-16x16:low-latency"
    # Without a time of the peer none is behind.
    assert policy_tables.schedules_text(run, max_keys=2048, peer="none")[0] == "1-16x16:low-latency"


def test_the_mean_is_geometric_and_of_the_keys_that_count(schedules_run):
    def times(p):
        return {"base": 0.1 if p.keys == 2048 else 1.0, "low-latency-2": 0.9}

    run = schedules_run(times, flashmla=2.0)  # behind which none is
    assert (
        policy_tables.schedules_text(run, max_keys=2048)[0] == "1-16x16:base"
    )  # 10 ** -(1 / 8) = 0.75
    assert policy_tables.schedules_text(run, max_keys=1024)[0] == "1-16x16:low-latency-2"


def test_a_schedule_that_failed_somewhere_is_not_chosen(schedules_run, flat):
    def times(p):
        return {"base": 1.0} | ({} if p == Point(5, 96, 16) else {"low-latency": 0.5})

    lines = policy_tables.schedules_text(schedules_run(times), max_keys=2048)
    assert lines[2] == "1-4x96:low-latency,5x96:base,6-16x96:low-latency"
    with pytest.raises(
        ValueError, match=r"must have all times of one of base, .*, got none at 1 x 16"
    ):
        policy_tables.schedules_text(schedules_run(times, QUICK), max_keys=2048)
    with pytest.raises(ValueError, match="must have all times"):
        policy_tables.schedules_text(schedules_run(flat(other=1.0)), max_keys=2048)


def test_the_kernels_tables_are_written_by_the_command(tmp_path, capsys, schedules_run, flat):
    path, module = tmp_path / "run.json", tmp_path / "policy.py"
    before = "import re\n\n# policy: written before\nTABLE = 5\n# /policy\n\nNAMED = 1\n"
    module.write_text(before)
    schedules_run(flat(base=2.0, low_latency_4=0.5)).save(path)
    given = ["policy", str(path), "--max-keys", "1024"]
    assert command.main(given) == 0
    text = capsys.readouterr().out
    assert (module.read_text(), load(path).names[0]) == (before, "base")
    assert command.main([*given, "--into", str(module)]) == 0
    assert module.read_text() == f"import re\n\n{text}\nNAMED = 1\n"
    assert policy_tables.part_of(module.read_text()) == (text, 1024)
    values: dict[str, Any] = {}
    exec(text, values)
    assert values["TABLE"] == "1-16:sparse"
    assert parse_schedules(values["SCHEDULES"])[96][5] == kernel_schedule("low-latency-4")
    # Ours follows, in the run as well.
    at_checkpoint = load(path).at(CHECKPOINT)
    assert at_checkpoint is not None
    assert at_checkpoint.times_us["ours"] == 0.5
    assert command.main([*given, "--into", str(module)]) == 0
    assert module.read_text() == f"import re\n\n{text}\nNAMED = 1\n"
    module.write_text("no marks\n")
    assert command.main([*given, "--into", str(module)]) == 2
    assert "one marked part # policy: ... # /policy, got 0" in capsys.readouterr().err


def test_the_tables_name_the_command_that_wrote_them(schedules_run, flat):
    run = schedules_run(flat(base=2.0, low_latency=0.5))
    written = "# policy: written by `sparse-mla-audit bench policy FILE --max-keys 512"
    text, _ = policy_tables.code(run, max_keys=512)
    assert text.startswith(f"{written}`\n")
    text, _ = policy_tables.code(run, max_keys=512, peer="base")
    assert text.startswith(f"{written} --peer base`\n")


def test_long_tables_stay_within_a_line(schedules_run):
    def times(p):
        fast = SCHEDULES[grid.ROWS.index(p.rows) % len(SCHEDULES)]
        return dict.fromkeys(SCHEDULES, 2.0) | {fast: 0.5}

    text, run = policy_tables.code(schedules_run(times), max_keys=2048)
    assert max(map(len, text.splitlines())) <= 100
    values: dict[str, Any] = {}
    exec(text, values)
    pick = policy_tables.chosen_by(values["SCHEDULES"])
    assert [pick(rows, 96) for rows in grid.ROWS] == list(SCHEDULES) * 2
    assert {r.times_us["ours"] for r in run.results} == {0.5}


def test_the_kernel_names_the_schedules_as_the_other_layers_do():
    assert dict(kernel_policy.NAMED) == {name: kernel_schedule(name) for name in SCHEDULES}


def test_the_module_has_a_place_for_the_tables():
    part, _ = policy_tables.part_of(Path(kernel_policy.__file__).read_text())
    values: dict[str, Any] = {}
    exec(part, values)
    assert (values["TABLE"], values["SCHEDULES"]) == (kernel_policy.TABLE, kernel_policy.SCHEDULES)
