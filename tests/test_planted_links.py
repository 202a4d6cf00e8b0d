"""A stranger's folder has links under the names that commands write: none is followed."""

from contextlib import suppress

import pytest

from dschat.checkpoint import atomic_files
from dschat.config import UserError
from dschat.distributed import process_registry
from dschat.launch.summary import write_summary
from dschat.observability.metrics_log import RowFile, record_start
from dschat.offline.evaluate import Results
from dschat.offline.rows import AnswerFile
from dschat.runtime import output_dir
from dschat.serving.web_chat import Preference, PreferenceFile


def write_report(folder):
    import dschat.reporting.page as report

    (folder / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    report.write_report([str(folder)])


def register(folder):
    with process_registry.registered(folder):
        pass


def prefer(folder):
    """The link is made after the start, which refuses it too."""
    file = PreferenceFile(str(folder / "other.jsonl"))
    with pytest.raises(UserError, match="symbolic links"):
        PreferenceFile(str(folder / "p.jsonl"))
    file.path = folder / "p.jsonl"
    messages = [{"role": "user", "content": "a"}]
    file.append(Preference(messages=messages, chosen="b", rejected="c"))


WRITERS = {
    "report": (write_report, ["report.html", "report.html.part"]),
    "summary": (lambda f: write_summary(f, {}), ["summary.json", "summary.json.part"]),
    "eval": (
        lambda f: Results({}, [], []).write(str(f / "out.json")),
        ["out.json", "out.json.new"],
    ),
    "generate": (
        lambda f: AnswerFile(str(f / "out"), {"a": 1}, overwrite=True),
        ["out.partial"],
    ),
    "its settings": (
        lambda f: AnswerFile(str(f / "out"), {"a": 1}, overwrite=True),
        ["out.settings.json", ".out.settings.json.new"],
    ),
    "metrics": (lambda f: RowFile(f / "metrics.jsonl", keeps_rows=False), ["metrics.jsonl"]),
    "starts": (lambda f: record_start(f, "start", 0), ["starts.jsonl"]),
    "lock": (output_dir.claim_output_dir, [".lock"]),
    "complete": (output_dir.mark_complete, ["COMPLETE"]),
    "stopped": (process_registry.mark_stopped, [".ranks/stopped"]),
    "tensors": (lambda f: atomic_files.write_file(f / "a.json", {}), ["a.json"]),
    "preferences": (prefer, ["p.jsonl"]),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_no_link_is_followed(writer, tmp_path):
    theirs, folder = tmp_path / "theirs", tmp_path / "run"
    theirs.write_text("kept")
    write, names = WRITERS[writer]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(theirs)
    with suppress(OSError, UserError):
        write(folder)
    assert theirs.read_text() == "kept"


@pytest.mark.parametrize("suffix", [".saving", ".removed", ".replaced"])
def test_a_link_to_a_folder_beside_the_checkpoints(suffix, tmp_path):
    theirs, folder = tmp_path / "theirs", tmp_path / "checkpoints"
    theirs.mkdir()
    (theirs / "kept").write_text("kept")
    folder.mkdir()
    (folder / f".step_4{suffix}").symlink_to(theirs)
    atomic_files.tidy(folder)
    assert [path.name for path in theirs.iterdir()] == ["kept"]
    assert list(folder.iterdir()) == []
