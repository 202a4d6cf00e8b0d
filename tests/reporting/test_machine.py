"""``dschat env``."""

import platform

import pytest

from dschat.reporting import machine
from dschat.reporting.machine import facts


def test_facts(monkeypatch, capsys):
    monkeypatch.setenv("DSCHAT_CPU_KERNELS", "1")
    monkeypatch.setenv("DSCHAT_API_KEYS", "secret")
    found = facts()
    assert found["torch"].startswith("2.")
    assert "DSCHAT_CPU_KERNELS=1" in found["environment"]
    assert found["vllm"].endswith("(--rollout_backend vllm)")
    assert (found["C kernels"] == "on") == (machine.cpu.load() is not None)
    monkeypatch.setattr("sys.argv", ["dschat env"])
    machine.main()
    printed = capsys.readouterr().out
    assert "secret" not in printed
    assert len(printed.splitlines()) == len(found)


def test_what_is_off_says_why(monkeypatch):
    monkeypatch.setattr(machine.cpu, "load", lambda: None)
    monkeypatch.setenv("DSCHAT_CPU_KERNELS", "0")
    assert facts()["C kernels"] == "off; DSCHAT_CPU_KERNELS=0"
    monkeypatch.delenv("DSCHAT_CPU_KERNELS")
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    assert facts()["C kernels"] == "off: no compiler"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("x86_64\nmodel name\t: A Chip\nflags: sse", "A Chip, "),
        ("aarch64\n\n", f"{platform.machine()}, "),  # a processor that Linux does not name
        ("arm64 arm", "arm64 arm, "),  # not Linux
    ],
)
def test_the_processor(monkeypatch, lines, name):
    monkeypatch.setattr(machine, "processor", lambda: lines)
    assert facts()["processor"].startswith(name)
