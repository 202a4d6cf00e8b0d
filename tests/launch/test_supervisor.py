"""Signals to train.py: training saves and stops, exit codes, and no process is left."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from stub_steps import alive, in_loop, interrupted, wait_for

from dschat.config import UserError
from dschat.launch import supervisor
from dschat.launch.supervisor import ProcessSupervisor, exit_code


def check_stopped(run: subprocess.Popen, pids: list[int]) -> str:
    """Check a run that was stopped and saved; returns its stdout."""
    stdout, stderr = run.communicate(timeout=60)
    assert run.returncode == 75, stderr
    notice, line = stderr.splitlines()
    assert notice == "stopping after this step; a second signal ends it at once"
    (folder,) = Path("out/step1_sft/checkpoints").iterdir()
    assert line == (f"stopped in step 1, saved in {folder}; the same command resumes from there")
    assert wait_for(lambda: not any(alive(pid) for pid in pids), 60)
    assert not Path("out/step2_reward").exists()
    assert not Path("out/step1_sft/.ranks").exists()
    return stdout


INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("returncode", "caught", "was_asked", "has_saved", "code"),
    [
        (0, [], False, False, 0),
        (2, [], False, False, 2),
        (-9, [], False, False, 137),  # killed, as by a kernel without memory
        (75, [], False, True, 75),  # SLURM signalled the processes, not train.py
        (1, [], False, True, 75),  # a launcher's own code
        (75, [INT], True, True, 75),
        (-15, [INT], True, False, 75),  # the launcher died of it
        (0, [TERM], True, False, 0),  # after its last step
        (1, [TERM], True, False, 1),  # failed while it stopped
        (-15, [INT], False, False, 130),  # nothing to save
        (0, [TERM], False, False, 143),
        (-15, [USR1], False, False, 75),  # requeue
        (-9, [INT, INT], True, False, 130),
        (-9, [USR1, TERM], True, False, 138),
        (75, [INT, INT], True, True, 75),  # had saved before
    ],
)
def test_exit_codes(returncode, caught, was_asked, has_saved, code):
    assert exit_code(returncode, caught, was_asked, has_saved) == code


@pytest.mark.parametrize(
    ("signum", "line"),
    [
        (signal.SIGKILL, "error: the step was killed, as the system does where memory runs out"),
        (signal.SIGTERM, ""),
        (0, ""),
    ],
)
def test_a_step_that_the_system_kills_is_a_line(signum, line, tmp_path, capfd):
    command = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {signum})"]
    with ProcessSupervisor() as runner:
        cluster = SimpleNamespace(number_here=0, relay=None)
        code = runner.run(command, {**os.environ}, tmp_path, cluster)
    assert code == (128 + signum if signum else 0)
    said = capfd.readouterr().err
    assert said.startswith(line)
    assert bool(said) == bool(line)


dist = pytest.mark.dist


@pytest.mark.slow  # test_watchdog.py looks for orphans in the quick suite
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("argv", "signals", "variables", "code", "line"),
    [
        ([], [INT], {}, 130, "interrupted"),
        ([], [TERM], {}, 143, "terminated"),
        ([], [INT] * 2, {"STUBBORN": "1"}, 130, "interrupted"),
        ([], [USR1], {}, 75, "stopped in step 1; the same command resumes from there"),
        pytest.param(["--num-gpus", "2"], [INT], {}, 130, "interrupted", marks=dist),
    ],
    ids=["ctrl-c", "sigterm", "ctrl-c twice, ignored", "requeue", "ctrl-c under the launcher"],
)
def test_interruption_while_a_model_loads_leaves_no_orphan(
    tree, argv, signals, variables, code, line
):
    returned, stderr, started = interrupted(argv, signals, **variables)
    assert (returned, stderr.splitlines()[-1]) == (code, line)
    assert argv or stderr == f"{line}\n"  # the launcher may say more
    assert wait_for(lambda: not any(alive(pid) for pid in started), 60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "signum"),
    [([], INT), ([], USR1), pytest.param(["--num-gpus", "2"], TERM, marks=dist)],
    ids=["ctrl-c", "requeue", "all ranks together"],
)
def test_a_signal_saves_and_stops(tree, argv, signum):
    run, pids = in_loop(*argv, ranks=2 if argv else 1)
    run.send_signal(signum)
    check_stopped(run, pids)


@pytest.mark.slow
def test_a_summary_that_cannot_be_written_is_not_an_error(tree):
    Path("out/summary.json").mkdir(parents=True)
    recipe_file = tree / "training/recipes/quiet.yaml"
    recipe_file.write_text(recipe_file.read_text() + "summary: true\n")
    run, pids = in_loop()
    run.send_signal(signal.SIGTERM)
    assert "could not write summary.json: " in check_stopped(run, pids)


@pytest.mark.slow
def test_a_second_signal_terminates_at_once(tree):
    run, pids = in_loop(STEP_S="600")
    run.send_signal(signal.SIGTERM)
    assert run.stderr.readline().startswith("stopping after this step")
    time.sleep(0.5)
    run.send_signal(signal.SIGTERM)
    stderr = run.communicate(timeout=60)[1]
    assert (run.returncode, stderr.splitlines()[-1]) == (143, "terminated")
    assert wait_for(lambda: not any(alive(pid) for pid in pids), 60)
    assert not Path("out/step1_sft/checkpoints").exists()


@pytest.mark.slow
def test_a_signal_to_a_rank_stops_the_run(tree):
    """SLURM may signal the processes, not train.py."""
    run, pids = in_loop()
    os.kill(pids[0], signal.SIGUSR1)
    stderr = run.communicate(timeout=60)[1]
    assert run.returncode == 75
    assert stderr.startswith("stopped in step 1, saved in out/step1_sft/checkpoints/step_")
    assert not Path("out/step2_reward").exists()


@pytest.mark.slow
def test_flags_that_start_over_are_to_be_left_out(tree):
    run, _ = in_loop("--overwrite-output-dir", "--restart")
    run.send_signal(signal.SIGINT)
    stderr = run.communicate(timeout=60)[1]
    line = "the same command without --restart and --overwrite_output_dir resumes from there\n"
    assert stderr.endswith(line)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others(tree, rank):
    run, pids = in_loop("--num-gpus", "2", ranks=2, KILL=str(rank))
    # Long: virtual machines have stood still for a minute.
    assert wait_for(lambda: not alive(pids[rank]), 150)
    assert wait_for(lambda: not alive(pids[1 - rank]), 150)
    stderr = run.communicate(timeout=150)[1]
    assert run.returncode not in (0, 75)
    assert f"error: process {rank} of 2 (pid {pids[rank]} on " in stderr
    assert "Traceback" not in stderr
    assert not Path("out/step1_sft/checkpoints").exists()


@pytest.mark.parametrize("name", [None, "out/.ranks"])
def test_a_registry_that_fails_is_named(name, monkeypatch, tmp_path):
    def fails(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), name)

    monkeypatch.setattr(supervisor.process_registry, "opened", fails)
    with pytest.raises(UserError, match=f"^{name or tmp_path}: No locks available; remove it, or"):
        ProcessSupervisor().run(["true"], {}, tmp_path, SimpleNamespace(number_here=0))


@pytest.mark.parametrize(("text", "found"), [('{"model_type": "llama"}', True), ("{}", False)])
def test_the_configuration_in_a_folder(text, found, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert supervisor._is_here(str(tmp_path)) == found


@pytest.mark.parametrize("name", ["a/b/c", "my model"])
def test_what_cannot_be_a_name_of_the_hub(name):
    with pytest.raises(UserError, match=f"^{name}: no such folder, and the hub: .*check the name$"):
        supervisor._is_here(name)
