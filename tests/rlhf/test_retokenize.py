"""A reward model with another tokenizer than the actor's: its score equals that of plain
transformers on the text, tokenized by the reward model's tokenizer.
"""

import json
from functools import cache

import pytest
import torch
from byte_tokenizers import byte_tokenizer
from program_cases import ppo_trainer
from quick import slow
from step_rows import PROMPTS
from tiny_models import CONFIGS, EOS, VOCAB
from tiny_models import tokenizer as word_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.config import RLHFConfig, UserError
from dschat.data.batches import PromptBatches, PromptTable
from dschat.data.segments import prompt_text_ids
from dschat.data.tokenize import prompt_dataset
from dschat.inference.protocol import Rollout
from dschat.rlhf.experience import from_rollout
from dschat.rlhf.retokenize import Retokenizer
from dschat.runtime.deepspeed_engine import unwrap

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A header that the request for an answer does not have
HEADED = (
    "{% for m in messages %}<|im_start|>{{ 'w5 w6: ' if m['role'] == 'assistant' }}"
    "{{ m['content'] }}</s>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SHOWS_ALL = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ mood }}{{ tone }}" + CHATML
NO_SYSTEM = "{{ raise_exception('no chats here') }}"
USER = {"role": "user", "content": "w3 w4"}


def reward_tokenizer(template=CHATML):
    """Bytes with a few merges: `<pad>` 0, `<s>` 1, `</s>` 2."""
    return byte_tokenizer("</s>", template, "<s> $A", bos_token="<s>", pad_token="<pad>")


def reward_folder(folder, family="opt_350m"):
    """OPT-350M's form has a projection, and norms behind the layers."""
    made, config = reward_tokenizer(), CONFIGS[family]()
    ids = {"vocab_size": len(made), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config.update(ids | {"num_labels": 1, "max_position_embeddings": 512})
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_config(config)
    model.eval().save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


@cache
def score_model(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


@torch.no_grad()
def plain_score(folder, ids):
    """By transformers alone: its own pooling of one sequence without padding."""
    return float(score_model(folder)(torch.tensor([ids])).logits[0, 0])


def trainer_of(models_folder, reward, **options):
    models = {"critic_model_name_or_path": "", "reward_model_name_or_path": str(reward)}
    return ppo_trainer(models_folder, **models | {"temperature": 1.5} | options)


def words(ids):
    return " ".join(f"w{i}" for i in ids if i > 1)


def answers_of(e):
    for i in range(e.num_sequences):
        ids = e.input_ids[i, e.prompt_lengths[i] : e.lengths[i]].tolist()
        yield i, ids[:-1] if e.finished[i] else ids, bool(e.finished[i])


@pytest.mark.parametrize(
    ("family", "zero"),
    [("llama", 0), *slow([("llama", 3), ("opt_350m", 0), ("opt_350m", 3)])],
)
def test_scores_are_those_of_the_text(family, zero, models_folder, tmp_path):
    """Prompts known by ids, as text, and as messages; some answers end, some do not."""
    folder = reward_folder(tmp_path / "reward", family)
    own = AutoTokenizer.from_pretrained(folder)
    long = {"max_answer_seq_len": 24, "temperature": 6.0}  # so that some end and some do not
    zeros = {"actor_zero_stage": zero, "critic_zero_stage": zero}
    trainer = trainer_of(models_folder, folder, **zeros, **long)
    prompts = [p for p in PROMPTS[:8] if p]
    chats = [[{"role": "user", "content": words(p)}] for p in prompts]
    for sources in (None, [f"{words(p)}!" for p in prompts], chats):
        batch = prompts if sources is None else PromptTable(prompts, sources)
        e = trainer.generate_experience(batch)
        assert e.finished.any()
        assert not e.finished.all()
        for i, answer, finished in answers_of(e):
            p = e.input_ids[i, : e.prompt_lengths[i]].tolist()
            if sources is chats:
                chat = [{"role": "user", "content": words(p)}]
                asked = own.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                ids = own(asked + words(answer), add_special_tokens=False)["input_ids"]
            else:
                mark = "" if sources is None else "!"
                space = " " if answer and words(answer) else ""
                ids = own(words(p) + mark + space + words(answer))["input_ids"]
            ids += [own.eos_token_id] if finished else []
            assert float(e.scores[i]) == pytest.approx(plain_score(folder, ids), abs=1e-5)
    trainer.train_rlhf(e)
    assert trainer.metrics["train/bad_steps"] == 0


def test_the_critic_starts_as_the_actor_with_a_new_head(models_folder, tmp_path, caplog):
    folder = reward_folder(tmp_path / "reward")
    trainer = trainer_of(models_folder, folder)
    engine = trainer.engine
    critic, actor = unwrap(engine.critic), unwrap(engine.actor)
    assert type(critic).__name__ == "LlamaForSequenceClassification"
    for (name, p), (_, q) in zip(
        critic.model.named_parameters(), actor.model.named_parameters(), strict=True
    ):
        assert torch.equal(p, q), name
    loud = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert sum("CRITIC WITH A NEW SCORE HEAD" in line for line in loud) == 1
    assert sum("REWARD MODEL WITH ANOTHER TOKENIZER" in line for line in loud) == 1
    engine.save(tmp_path / "out")
    saved = AutoTokenizer.from_pretrained(tmp_path / "out" / "critic")
    assert saved.get_vocab() == word_tokenizer().get_vocab()


@pytest.mark.slow
def test_a_critic_of_its_own(models_folder, tmp_path):
    folder = reward_folder(tmp_path / "reward")
    critic = str(models_folder / "llama_reward")
    engine = trainer_of(models_folder, folder, critic_model_name_or_path=critic).engine
    plain = AutoModelForSequenceClassification.from_pretrained(critic)
    assert torch.equal(unwrap(engine.critic).score.weight, plain.score.weight)
    base = str(models_folder / "llama")
    engine = trainer_of(
        models_folder, models_folder / "llama_reward", critic_model_name_or_path=base
    ).engine
    assert engine.checkpoints.critic.reward_form == "base"
    assert engine.checkpoints.reward_tokenizer is None
    other = reward_folder(tmp_path / "other")
    with pytest.raises(UserError, match="--critic_model_name_or_path .* another vocabulary"):
        trainer_of(models_folder, folder, critic_model_name_or_path=str(other))
    with pytest.raises(UserError, match="--reward_model_name_or_path .* is not a reward model"):
        trainer_of(models_folder, models_folder / "llama", critic_model_name_or_path=critic)


# -- texts -----------------------------------------------------------------------------------------


def actors():
    made = word_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    return made


@pytest.mark.parametrize(
    ("prompt", "answer", "finished", "source", "text"),
    [
        ([3, 4], [5, EOS], True, None, "<s>w3 w4 w5</s>"),
        ([3, 4], [5], False, None, "<s>w3 w4 w5"),
        ([3, EOS, VOCAB, 4], [5, EOS], True, None, "<s>w3</s>w4 w5</s>"),
        ([EOS, 3, 4], [5, EOS], True, None, "<s>w3 w4 w5</s>"),  # as OPT's, whose BOS is EOS
        ([3], [EOS], True, None, "<s>w3</s>"),
        ([3, 4], [5, EOS], True, "Say: ", "<s>Say:  w5</s>"),
        (
            [3, 4],
            [5, 6, EOS],
            True,
            [{"role": "system", "content": "be"}, USER],
            "<|im_start|>system\nbe</s>\n<|im_start|>user\nw3 w4</s>\n<|im_start|>assistant\n"
            "w5 w6</s>",
        ),
        ([3], [5], False, [USER], "<|im_start|>user\nw3 w4</s>\n<|im_start|>assistant\nw5"),
        ([3], [EOS], True, [USER], "<|im_start|>user\nw3 w4</s>\n<|im_start|>assistant\n</s>"),
    ],
)
def test_texts(prompt, answer, finished, source, text):
    own = reward_tokenizer()
    made = Retokenizer(actors(), own, (EOS,))
    assert own.decode(made.sequence(prompt, answer, finished, source)) == text


@pytest.mark.parametrize("end", [[EOS], []])
@pytest.mark.parametrize("answer", [[5], [5, 6], [6], []])
def test_an_answer_whose_words_stand_in_its_header_too(answer, end):
    own = reward_tokenizer(HEADED)
    ids = Retokenizer(actors(), own, (EOS,)).sequence([3], [*answer, *end], bool(end), [USER])
    text = f"<|im_start|>w3 w4</s>\n<|im_start|>w5 w6: {words(answer)}"
    assert own.decode(ids) == text + "</s>" * len(end)


def test_a_template_that_refuses_gives_way_to_the_default(caplog):
    own = reward_tokenizer(NO_SYSTEM)
    made = Retokenizer(actors(), own, (EOS,))
    for _ in range(2):
        ids = made.sequence([3], [5, EOS], True, [USER])
        assert own.decode(ids) == "<s>\n\nHuman: w3 w4\n\nAssistant: w5</s>"
    assert len(caplog.records) == 1


def test_long_texts_lose_their_beginning_and_keep_the_bos():
    own = reward_tokenizer()
    whole = Retokenizer(actors(), own, (EOS,)).sequence([3] * 9, [5, EOS], True, None)
    cut = Retokenizer(actors(), own, (EOS,), max_len=8).sequence([3] * 9, [5, EOS], True, None)
    assert cut == [1, *whole[-7:]]


def test_a_rank_without_rows_runs_the_forward(models_folder, tmp_path):
    trainer = trainer_of(models_folder, reward_folder(tmp_path / "reward"))
    dummy = from_rollout([], Rollout(), 0).take([], torch.device("cpu"))
    assert trainer.engine.score(dummy).shape == (1,)


def test_tools_and_template_variables_of_rows_and_run(models_folder, tmp_path):
    """From the data to the score; also after prompts were picked, joined and kept as JSON."""
    own = reward_tokenizer(SHOWS_ALL)
    folder = reward_folder(tmp_path / "reward")
    own.save_pretrained(folder)
    tool = {"type": "function", "function": {"name": "w5", "parameters": {"type": "object"}}}
    rows = [
        {"prompt": [USER], "tools": [tool], "chat_template_kwargs": {"mood": "glad"}},
        {"prompt": [{"role": "user", "content": "w6"}]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    of_run = {"tone": "kind", "mood": "dull"}
    trainer = trainer_of(models_folder, folder, max_prompt_seq_len=400, chat_template_kwargs=of_run)
    config = RLHFConfig(
        actor_model_name_or_path="a", critic_model_name_or_path="c", data_path=[str(path)],
        max_prompt_seq_len=400, eval_fraction=0.0,
    )  # fmt: skip
    (batch,) = PromptBatches(prompt_dataset(config, actors()), 2, 0, 1, seed=0)
    batch = batch.pick([1]).concat(PromptTable(**json.loads(json.dumps(vars(batch.pick([0]))))))
    e = trainer.generate_experience(batch)
    for i, answer, finished in answers_of(e):
        row = next(row for row in rows if row["prompt"] == e.sources[i])
        variables = of_run | row.get("chat_template_kwargs", {})
        text = own.apply_chat_template(
            row["prompt"], tools=row.get("tools"), tokenize=False, add_generation_prompt=True,
            **variables,
        )  # fmt: skip
        ids = own(text + words(answer), add_special_tokens=False)["input_ids"]
        ids += [own.eos_token_id] if finished else []
        assert float(e.scores[i]) == pytest.approx(plain_score(folder, ids), abs=1e-5)


@pytest.mark.slow
def test_the_data_of_step_3_has_the_text_of_its_prompts():
    tokenizer = tiny_tokenizer()
    config = RLHFConfig(actor_model_name_or_path="a", critic_model_name_or_path="c")
    rows = prompt_dataset(config, tokenizer)
    batch = next(iter(PromptBatches(rows, 4, 0, 1, seed=0)))
    assert len(batch) == len(batch.sources) == 4
    for ids, source in zip(batch, batch.sources, strict=True):
        assert isinstance(source, list)
        assert prompt_text_ids(tokenizer, source) == ids
