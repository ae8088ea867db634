from types import SimpleNamespace

from sparse_mla_verify.bench import (
    gpu_state,
)


def test_nvidia_smi_is_asked_and_may_not_answer():
    asked = []

    def answers(command, **options):
        asked.append(command)
        return SimpleNamespace(stdout="1980, 3201\n")

    fields = ("clocks.max.sm", "clocks.max.mem")
    assert gpu_state.query(fields, "GPU-1", answers) == dict(
        zip(fields, ("1980", "3201"), strict=True)
    )
    assert asked[0][:3] == ["nvidia-smi", "-i", "GPU-1"]

    def absent(command, **options):
        raise FileNotFoundError

    assert gpu_state.query(fields, "GPU-1", absent) == {}
    assert gpu_state.query(("one",), "GPU-1", answers) == {}
