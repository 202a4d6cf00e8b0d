"""Runs of DeepSpeed engines that are saved and resumed: bit-equal, or with other world sizes."""

import pytest
from python_process import python
from quick import some
from small_run import SAVED_AT, SmallRun, Spec, launch, resumed, straight

from dschat.checkpoint.manager import CheckpointManager
from dschat.checkpoint.manifest import newest
from dschat.config import UserError

BF16 = "bfloat16"
TWO = [
    *(Spec(0), Spec(1), Spec(2), Spec(3), Spec(2, BF16), Spec(3, BF16)),
    *(Spec(0, lora=True), Spec(2, lora=True), Spec(3, lora=True)),
    *(Spec(2, offload=True), Spec(3, offload=True), Spec(2, BF16, offload=True)),
    *(Spec(2, model="llama_tied"), Spec(3, model="llama_tied")),
    *(Spec(2, lora=True, bits=4), Spec(2, BF16, lora=True, bits=4), Spec(1, lora=True, bits=8)),
]
HERE = [Spec(0, model="gpt2"), Spec(3, lora=True), Spec(0, lora=True, bits=4)]  # GPT-2 has dropout


def specs(values, quick=()):
    return pytest.mark.parametrize("spec", some(values, quick), ids=lambda spec: spec.name)


def assert_close(rows, expected, dtype):
    """Losses to 1e-4, and gradient norms and averages as far as they say the same; the counter."""
    tolerance = {"float32": 1e-4, BF16: 2e-2}[dtype]
    for row, other in zip(rows, expected, strict=True):
        assert row[:3] == pytest.approx(other[:3], rel=tolerance)
        assert row[3] == other[3]


@specs(dict.fromkeys([*HERE, *TWO]), HERE[:1])
def test_one_process_to_the_bit(spec, here):
    folder, rows = here(spec)
    assert rows == straight(spec, folder)  # saving changes nothing
    assert resumed(spec, folder, 1) == rows[SAVED_AT:]


@pytest.mark.dist
@specs(TWO)
def test_two_processes_to_the_bit(spec, two):
    done = two(spec)
    assert done["from two"] == done["saved"][SAVED_AT:]


@pytest.mark.dist
@specs(TWO)
def test_two_go_on_with_one_s(spec, two):
    done = two(spec)
    assert_close(done["from one"], done["saved"][SAVED_AT:], spec.dtype)


@pytest.mark.dist
@specs(TWO)
def test_one_process_resumes_from_two(spec, two, here):
    two(spec)
    folder, rows = here(spec)
    assert_close(resumed(spec, folder, 2), rows[SAVED_AT:], spec.dtype)
    (checkpoint,) = (folder / f"{spec.name}_2/checkpoints").iterdir()  # no conversion is left


@pytest.mark.dist
@specs([Spec(0), Spec(2), Spec(3)])
def test_two_new_processes_to_the_bit(spec, two, here):
    done, (folder, _) = two(spec), here(spec)
    assert launch(folder, [("resumed", spec, (2,))]) == [done["from two"]]


@pytest.mark.parametrize("zero", some([0, 2, 3], [3]))
def test_frozen_weights_are_left_out(zero, here):
    """Adapters: two of rank 4 on (32, 32) and (32, 16) in two layers, and Adam's moments."""
    spec = Spec(zero, lora=True)
    folder, _ = here(spec)
    trained = 2 * 4 * ((32 + 32) + (32 + 16))
    engine = newest(folder / f"{spec.name}_1").files
    size = sum(size for name, (size, _) in engine.items() if name.startswith("model/"))
    assert 3 * 4 * trained < size < 4 * 4 * trained + 30_000
    whole = sum(p.numel() for p in SmallRun(Spec(0), folder).engine.module.parameters())
    assert size < 3 * 4 * whole


def test_nvme_is_refused_for_other_processes(here):
    folder, _ = here(Spec(2))
    run = SmallRun(Spec(2), folder)
    run.engine.config["zero_optimization"]["offload_optimizer"] = {"device": "nvme"}
    checkpoints = CheckpointManager(folder / "llama_z2_float32_1", {})
    found = checkpoints.latest()
    found.world_size = 2
    with pytest.raises(UserError, match=r"--resume .*nvme.*start as many processes as before"):
        checkpoints.load(found, run.state())


def test_looking_for_a_checkpoint_imports_no_torch(here):
    folder, _ = here(Spec(0))
    source = (
        "import sys; from dschat.checkpoint.manifest import newest\n"
        f"found = newest({str(folder / 'llama_z0_float32_1')!r})\n"
        "assert found.settings['seed'] == 7\n"
        "sys.exit(' '.join({'torch', 'deepspeed'} & set(sys.modules)) or 0)"
    )
    done = python("-c", source)
    assert (done.returncode, done.stderr) == (0, "")
