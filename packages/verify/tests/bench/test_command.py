import argparse
import subprocess
import sys

import pytest
import torch

from sparse_mla_verify.bench import (
    command,
)


def test_a_record_names_no_place_on_a_machine():
    given = ["run", "--quick", "--out", "/a/b.json", "--plot=/a/c.png", "--flashmla", "/d"]
    assert command.said([*given, "--schedule", "split=8"]) == (
        "sparse-mla-audit bench run --quick --schedule split=8"
    )


def test_the_benchmark_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--quick"]) == 2
    assert "bench needs an NVIDIA GPU" in capsys.readouterr().err
    assert command.main(["--points", "5x96x256"]) == 2
    for given in (
        ["--budget", "0"],
        ["--points", "5x96"],
        ["--quick", "--points", "5x96x256"],
        ["--trials", "0"],
        ["--width", "2047"],
    ):
        with pytest.raises(SystemExit):
            command.main(given)
    with pytest.raises(argparse.ArgumentTypeError, match="ROWSxHEADSxKEYS"):
        command._points("5x96")


def test_records_are_read_again_by_command(tmp_path, capsys, grid_run):
    path, plot = tmp_path / "run.json", tmp_path / "run.svg"
    grid_run().save(path)
    assert command.main(["table", str(path), "--plot", str(plot)]) == 0
    assert plot.exists()
    capsys.readouterr()
    assert command.main(["policy", str(path), "--max-keys", "2048"]) == 0
    assert 'TABLE = "1-16:split"\n' in capsys.readouterr().out  # of base, as fast as FlashMLA
    assert command.main(["policy", str(path), "--max-keys", "-5"]) == 2


def test_records_are_read_without_pytorch_and_the_dsl():
    block = "".join(f"sys.modules[{name!r}] = None; " for name in ("torch", "cutlass"))
    code = f"import sys; {block}import sparse_mla_verify.bench.command"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_width_that_is_no_number_says_what_it_must_be(capsys):
    with pytest.raises(SystemExit):
        command.main(["--width", "wide"])
    assert "argument --width: must be a whole number, got 'wide'" in capsys.readouterr().err
