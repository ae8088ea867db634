import subprocess
import sys

import pytest

from sparse_mla_verify import __main__ as command_line


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_every_command_has_help_of_its_own_name(name, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main([*name.split(), "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: sparse-mla-audit {name} ")


def test_help_lists_every_command_and_imports_none():
    code = "import sys; from sparse_mla_verify.__main__ import main; main(['--help'])\n"
    code += "assert not {'numpy', 'torch', 'cutlass', 'rich'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert all(f"\n  {name} " in done.stdout for name in command_line.COMMANDS)


@pytest.mark.parametrize(
    ("given", "name", "rest"),
    [
        ([], "run", []),
        (["--schedule", "base"], "run", ["--schedule", "base"]),
        (["run", "--json"], "run", ["--json"]),
        (["push", "check", "--ranks", "2"], "push check", ["--ranks", "2"]),
        (["bench", "table", "FILE"], "bench", ["table", "FILE"]),
    ],
)
def test_the_first_words_name_the_command(given, name, rest):
    assert command_line.split(given) == (name, rest)


@pytest.mark.parametrize("given", [["nonsense"], ["push"], ["push", "nonsense"]])
def test_a_word_that_names_no_command_ends_with_2(given, capsys):
    assert command_line.main(given) == 2
    assert f"got {' '.join(given)!r}" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["push"], ["push", "nonsense"], ["push", "--ranks", "2"]])
def test_the_first_word_of_two_names_the_commands_that_begin_with_it(given, capsys):
    assert command_line.main(given) == 2
    says = f"command must be one of push check, push group, got {' '.join(given[:2])!r}\n"
    assert capsys.readouterr().err == says


@pytest.mark.parametrize("asked", ["-h", "--help"])
def test_help_of_the_first_word_of_two_lists_the_commands_that_begin_with_it(asked, capsys):
    assert command_line.main(["push", asked]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: sparse-mla-audit push COMMAND ")
    listed = printed.partition("commands:\n")[2].splitlines()
    assert [line.split("  ")[1] for line in listed] == ["push check", "push group"]


def test_the_module_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "sparse_mla_verify", "explain", "nothing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "claim must be one of" in done.stderr
