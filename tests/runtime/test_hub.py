"""Cards of saved models, and their pushes to a hub: a small HTTP server with the hub's answers."""

import base64
import errno
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import tiny_models
from byte_tokenizers import byte_tokenizer
from damages import LINES, folder, pipe, remove
from huggingface_hub import HfApi, ModelCard, constants

from dschat.checkpoint.hf_export import export_hf
from dschat.config import RewardConfig, RLHFConfig, SFTConfig, UserError
from dschat.runtime import hub
from dschat.runtime.checkpointing import TrainingCheckpointer
from dschat.runtime.hub import write_card

USER = {"name": "ann", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        assert self.path == "/api/whoami-v2"
        self.reply(self.server.user, 200 if self.headers["authorization"] else 401)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        hub, path = self.server, self.path
        if path == "/api/repos/create":
            hub.made.append(json.loads(body))
            self.reply({"url": f"{hub.url}/ann/{hub.made[-1]['name']}"}, 200 if hub.takes else 403)
        elif path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            self.reply(
                {"files": [f | {"uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        elif path.endswith("/commit/main"):
            hub.opened.wait(30)
            hub.commits += 1
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.reply({"commitUrl": f"{hub.url}/ann/x/commit/{0:040}", "commitOid": "0" * 40})
        else:
            assert path == "/api/validate-yaml"
            self.reply({})

    def reply(self, content, code=200):
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.made, server.files, server.user, server.takes = [], {}, USER, True
    server.commits, server.opened = 0, threading.Event()
    server.opened.set()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_api", HfApi(server.url, token="hf_abc"))
    yield server
    server.shutdown()
    server.server_close()


def step_of(folder, config, **files):
    """A step's output ``folder`` with a model in each of ``files``' folders."""
    for name in files:
        model = folder / ("" if name == "root" else name)
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        (model / "model.safetensors").write_bytes(name.encode())
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "eval/score": 1.5}\n{"step": 3, "loss": 7.0}\n'
        '{"step": 3, "eval/score": 2.25, "eval/kl": null}\n'
    )
    config.output_dir = str(folder)
    return config


def test_a_step_is_pushed_with_cards(server, tmp_path):
    config = RLHFConfig(
        actor_model_name_or_path="facebook/opt-125m",
        critic_model_name_or_path="lab/reward",
        push_to_hub="ann/chat",
        hub_private_repo=True,
        data_path=["Dahoas/rm-static:0.5", str(tmp_path / "mine.jsonl"), "builtin/chat"],
        seed=7,
        reward_args=["judge.base_url=http://me:secret@host/v1"],
    )
    step_of(tmp_path / "out", config, actor=1, critic=1)
    hub.check_hub(config)
    hub.publish(config)
    assert [(made["name"], made["visibility"]) for made in server.made] == [("chat", "private")]
    models = {"config.json", "model.safetensors", "README.md"}
    assert server.files.keys() == models | {f"critic/{name}" for name in models}
    assert server.files["model.safetensors"] == b"actor"
    card = ModelCard(server.files["README.md"].decode())
    assert card.data.to_dict() == {
        "base_model": "facebook/opt-125m",
        "datasets": ["Dahoas/rm-static"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["dschat", "ppo"],
    }
    assert "| score | 1.5 | 2.25 |" in card.text
    assert "| kl |" not in card.text
    for words in ("dschat rlhf \\\n", "--seed 7", "deepspeed 0."):
        assert words in card.text
    for words in ("push_to_hub", "output_dir", "secret"):
        assert words not in card.text
    critic = ModelCard(server.files["critic/README.md"].decode())
    assert critic.data.base_model == "lab/reward"
    assert critic.data.pipeline_tag == "text-classification"
    assert "score |" not in critic.text
    assert "`AutoModel` loads the backbone" in critic.text
    assert "AutoModel" not in card.text


def test_a_run_s_other_files_are_not_pushed(server, tmp_path):
    config = step_of(tmp_path, SFTConfig(push_to_hub="chat"), root=1)
    for name in ("checkpoints/step_1", "tensorboard", "adapter"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights.safetensors").write_bytes(b"")
    (tmp_path / "training_config.yaml").write_text("seed: 1")
    hub.publish(config, waits=False)
    hub.publish(config)  # after the one before
    models = {"config.json", "model.safetensors", "README.md"}
    assert server.files.keys() == models | {"adapter/weights.safetensors", "adapter/README.md"}
    assert ModelCard(server.files["adapter/README.md"].decode()).data.library_name == "peft"


def test_a_user_s_own_files_are_not_pushed(server, tmp_path):
    """With ``--output_dir .``: the model's files are those that were saved."""
    config = step_of(tmp_path, SFTConfig(push_to_hub="chat"), root=1)
    model = tiny_models.causal_lm("llama")
    export_hf(tmp_path, model.state_dict().items(), model, model.config, byte_tokenizer("</s>"))
    saved = {path.name for path in tmp_path.iterdir() if path.is_file()} - {"metrics.jsonl"}
    for name in ("notes.txt", "secrets.json", "train.py", "data/rows.json", "other.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    hub.publish(config)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= saved
    adapter = {"adapter/adapter_model.safetensors", "adapter/README.md"}
    assert server.files.keys() == {*saved, "README.md", *adapter}


def test_a_push_that_fails_is_a_warning(server, tmp_path, caplog):
    """It has a command for the shell."""
    server.takes, out = False, tmp_path / "my model"
    config = step_of(out, SFTConfig(push_to_hub="ann/chat"), root=1)
    hub.publish(config)
    (line,) = caplog.messages
    assert line.startswith("not pushed to the hub: ")
    assert f"; by hand: hf upload ann/chat '{out}' . --exclude" in line


@pytest.mark.parametrize(
    ("repo", "user", "words"),
    [
        (
            "ann/ch at",
            USER,
            "--push_to_hub ann/ch at: Repo id must .*; name a repository as OWNER/",
        ),
        ("bob/chat", USER, "the token of ann cannot write there; .* of ann or lab"),
        (
            "ann/chat",
            USER | {"auth": {"accessToken": {"role": "read"}}},
            "use one with write access",
        ),
    ],
)
def test_what_cannot_be_pushed_is_refused(server, repo, user, words):
    server.user = user
    with pytest.raises(UserError, match=words):
        hub.check_hub(SFTConfig(push_to_hub=repo))
    hub.check_hub(SFTConfig())
    server.user = USER
    for fine in ("chat", "ann/chat", "lab/chat"):
        hub.check_hub(SFTConfig(push_to_hub=fine))


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_row_is_left_out_of_a_card(line, tmp_path):
    """One flipped bit in the log must not cost the models that are still to be saved."""
    config = step_of(tmp_path, SFTConfig(), root=1)
    write_card(tmp_path, config)
    whole = (tmp_path / "README.md").read_text()
    assert "| score | 1.5 | 2.25 |" in whole
    rows = (tmp_path / "metrics.jsonl").read_text().split("\n")
    damaged = "\n".join([rows[0], line, '{"step": 1, "eval/score": "1"}', *rows[1:]])
    (tmp_path / "metrics.jsonl").write_text(damaged, encoding="latin-1")
    write_card(tmp_path, config)
    assert (tmp_path / "README.md").read_text() == whole


@pytest.mark.parametrize("harm", [pipe, folder])
def test_a_card_that_cannot_be_written_ends_no_run(harm, tmp_path, monkeypatch, caplog):
    config = step_of(tmp_path, SFTConfig(), root=1)
    harm(tmp_path / "README.md")
    write_card(tmp_path, config)
    harm(tmp_path / "metrics.jsonl")
    write_card(tmp_path, config)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(hub, "replace_file", Mock(side_effect=full))
    remove(tmp_path / "README.md")
    write_card(tmp_path, config)
    assert "README.md cannot be written: No space left on device" in caplog.text


def test_a_user_s_card_stays(tmp_path):
    config = step_of(tmp_path, SFTConfig(), root=1)
    write_card(tmp_path, config)
    first = (tmp_path / "README.md").read_text()
    config.seed = 77
    write_card(tmp_path, config)
    changed = (tmp_path / "README.md").read_text()
    assert changed != first
    mine = "\n".join(line for line in changed.splitlines() if not line.startswith("<!--"))
    (tmp_path / "README.md").write_text(mine)
    write_card(tmp_path, config)
    assert (tmp_path / "README.md").read_text() == mine


def test_the_hub_s_base_is_found_through_local_folders(tmp_path):
    base = step_of(tmp_path / "sft", SFTConfig(model_name_or_path="facebook/opt-125m"), root=1)
    write_card(tmp_path / "sft", base)
    config = RewardConfig(model_name_or_path=str(tmp_path / "sft"), loss="dpo")
    step_of(tmp_path / "dpo", config, actor=1)
    write_card(tmp_path / "dpo" / "actor", config)
    card = ModelCard((tmp_path / "dpo" / "actor" / "README.md").read_text())
    assert (card.data.base_model, card.data.tags) == ("facebook/opt-125m", ["dschat", "dpo"])
    (tmp_path / "sft" / "README.md").write_text("---\na: [\n---\nmine")
    write_card(tmp_path / "dpo" / "actor", config)
    card = ModelCard((tmp_path / "dpo" / "actor" / "README.md").read_text())
    assert card.data.base_model is None


def test_the_card_of_the_best_model_has_no_metrics_of_the_last(tmp_path):
    config = step_of(tmp_path / "reward", RewardConfig(), root=1, reward_best=1)
    for name, has_metrics in (("", True), ("reward_best", False)):
        write_card(tmp_path / "reward" / name, config)
        text = (tmp_path / "reward" / name / "README.md").read_text()
        assert ("## Metrics" in text) == has_metrics
        assert f"The {name or 'model'} of reward-model" in text
        assert "pipeline_tag: text-classification" in text


def test_a_notebook_s_card_has_no_metrics_of_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step_of(tmp_path, config := SFTConfig(), root=1)
    config.output_dir = None
    write_card(tmp_path, config)
    assert "Metrics" not in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(("strategy", "saves"), [("end", 0), ("every_save", 2)])
def test_each_checkpoint_is_pushed_where_asked(strategy, saves, server, tmp_path):
    """In the background: training goes on while the hub takes no commit."""
    config = SFTConfig(push_to_hub="ann/x", hub_strategy=strategy, save_steps=2)
    step_of(tmp_path, config, root=1)
    manager, saved = SimpleNamespace(poll=lambda: None, save=lambda *_: None), []
    checkpointer = TrainingCheckpointer(config, manager, None, lambda: saved.append(1))
    server.opened.clear()
    for step in range(1, 7):
        checkpointer.after(step, SimpleNamespace, is_last=step == 6)
    assert (len(saved), server.commits) == (saves, 0)
    server.opened.set()
    hub.publish(config)  # after those before
    assert server.commits == saves + 1
