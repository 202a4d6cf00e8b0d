"""DPO, IPO and KTO tasks: log-probs, mismatched answers, the reference."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from preference_cases import build_preference
from step_cases import Case
from tiny_models import causal_lm
from torch import nn

from dschat.builtin.tiny_model import tiny_tokenizer
from dschat.config import RewardConfig
from dschat.data.micro_batches import MicroBatchSize
from dschat.data.tokenize import preference_dataset
from dschat.models.heads import LanguageModel
from dschat.observability.console import format_line
from dschat.supervised import loop
from dschat.supervised.preference import Pairs, PreferenceTask, answer_logps

BLOCKS = ("chosen_ids", "rejected_ids")
ROWS = [
    {"chosen_ids": [4, 5, 6, 7, 0], "rejected_ids": [4, 5, 9, 0], "prompt_length": 2},
    {"chosen_ids": [8, 3, 0], "rejected_ids": [8, 2, 2, 2, 2, 2, 0], "prompt_length": 1},
    {"chosen_ids": [5, 5, 5, 6, 0], "rejected_ids": [5, 5, 5, 7], "prompt_length": 3},
]


def logprob_by_hand(model: nn.Module, ids: list[int], prompt_length: int) -> float:
    """Of the tokens behind the prompt, one at a time, in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    return sum(float(logprobs[t - 1, ids[t]]) for t in range(prompt_length, len(ids)))


def test_mismatched_answers_are_the_next_rows():
    """The prompt of a row, with the next row's chosen and rejected answer in turn."""
    pairs = Pairs(ROWS, max_len=6)
    found = [row["mismatched_ids"] for row in (pairs[i] for i in range(3))]
    assert found == [
        [4, 5, 3, 0],  # chosen answer of row 1
        [8, 7],  # rejected answer of row 2
        [5, 5, 5, 6, 7, 0],  # chosen answer of row 0
    ]
    assert Pairs(ROWS, max_len=4)[2]["mismatched_ids"] == [5, 5, 5, 6]
    assert "mismatched_ids" not in Pairs(ROWS)[0]
    assert "ref_logps" not in pairs[0]


@pytest.mark.parametrize("prompts", ["aaaabbbcccca", "abab", "aab", "abb", "aaabaaaa"])
def test_mismatched_answers_are_of_another_prompt(prompts):
    """The next one, by a plain search; one number is each row's prompt, another its answer."""
    rows = [
        {"chosen_ids": [ord(p), 1000 + i], "rejected_ids": [ord(p)], "prompt_length": 1}
        | {"prompt_key": ord(p)}
        for i, p in enumerate(prompts)
    ]
    pairs = Pairs(rows, max_len=9)
    for i, prompt in enumerate(prompts):
        following = [j % len(prompts) for j in range(i + 1, i + len(prompts))]
        other = next(j for j in following if prompts[j] != prompt)
        assert pairs[i]["mismatched_ids"] == [ord(prompt), 1000 + other]


def kto_table(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"completion": "x", "label": True, **r}) + "\n" for r in rows)
    )
    flags = {"data_path": [str(path)], "data_split": "0,1,0", "eval_fraction": 0.0}
    return preference_dataset(RewardConfig(loss="kto", max_seq_len=32, **flags), tiny_tokenizer())


def test_answers_to_one_long_prompt_are_not_mismatched(tmp_path):
    """A prompt that is cut, to more or fewer tokens, is still one."""
    long = {"prompt": "long " * 99}
    rows = [long | {"completion": "y" * n} for n in (1, 5, 2)] + [{"prompt": "short"}]
    table = kto_table(tmp_path, rows)
    assert len({tuple(row["chosen_ids"][: row["prompt_length"]]) for row in table}) > 2
    pairs, (*_, other) = Pairs(table, 32), table
    answer = other["chosen_ids"][other["prompt_length"] :]
    for row in list(pairs)[:3]:
        prompt = row["chosen_ids"][: row["prompt_length"]]
        assert row["mismatched_ids"] == (prompt + answer)[:32]


def test_one_prompt_alone_has_no_mismatched_answers(tmp_path, caplog):
    rows = [{"prompt": "one", "completion": f" a{i}", "label": i % 2 > 0} for i in range(4)]
    table = kto_table(tmp_path, rows)
    pairs = Pairs(table, 32)
    assert "all 4 rows have one prompt: KTO's reference point" in caplog.text
    assert all(row["mismatched_ids"] == row["chosen_ids"][: row["prompt_length"]] for row in pairs)
    models = (
        LanguageModel(causal_lm("llama", seed=s, vocab_size=len(tiny_tokenizer()))) for s in (0, 5)
    )
    policy, reference = models
    task = PreferenceTask(RewardConfig(loss="kto"), reference)
    (batch,) = task.prepare(policy, [task.collate(list(pairs))])
    assert batch.kl == 0.0
    assert task.loss(policy, batch)[0] > 0


def reference_task(loss: str, **knobs) -> PreferenceTask:
    reference = LanguageModel(causal_lm("llama", seed=5))
    return PreferenceTask(RewardConfig(loss=loss, **knobs), reference)


def losses_of(task, policy, parts):
    """The micro-batches of a step, the sum of their losses, and the means of its metrics."""
    batches = task.prepare(policy, parts)
    losses, sums = zip(*(task.loss(policy, batch) for batch in batches), strict=True)
    means = task.summarize({name: sum(s[name] for s in sums) for name in sums[0]})
    return batches, float(sum(losses).detach()), means


def logratios_by_hand(task, policy, rows, block):
    """Log-probs of each row's answer ``block`` by the policy, and less those by the reference."""
    models = policy.double().model, task.reference.double().model
    logps = [[logprob_by_hand(m, r[block], r["prompt_length"]) for r in rows] for m in models]
    return np.array(logps[0]), np.array(logps[0]) - np.array(logps[1])


@pytest.mark.parametrize("loss", ["dpo", "cdpo", "ipo", "kto"])
def test_loss_and_metrics_of_a_batch(loss):
    """Against the papers' formulas on log-probs of plain forwards, a sequence at a time."""
    knobs = {"label_smoothing": 0.1} if loss == "cdpo" else {}
    task = reference_task(loss.removeprefix("c"), beta=0.2, **knobs)
    policy = LanguageModel(causal_lm("llama"))
    pairs = Pairs(ROWS, max_len=20)
    parts = [task.collate([pairs[0], pairs[1]]), task.collate([pairs[2]]), task.collate([])]
    batches, found, means = losses_of(task, policy, parts)

    blocks, rows = (*BLOCKS, "mismatched_ids"), [pairs[i] for i in range(3)]
    (chosen, w), (rejected, r), (_, z) = (
        logratios_by_hand(task, policy, rows, block) for block in blocks
    )
    kl = z.mean()
    assert kl > 0.1  # so that KTO's reference point counts
    h = 0.2 * (w - r)
    expected = {
        "dpo": np.logaddexp(0, -h),
        "cdpo": 0.9 * np.logaddexp(0, -h) + 0.1 * np.logaddexp(0, h),
        "ipo": (w - r - 2.5) ** 2,
        "kto": 0.5 / (1 + np.exp(0.2 * (w - kl))) + 0.5 / (1 + np.exp(0.2 * (kl - r))),
    }[loss]
    assert found == pytest.approx(expected.sum(), rel=1e-4)
    assert means["loss"] == pytest.approx(expected.mean(), rel=1e-4)
    assert means["rewards/margins"] == pytest.approx(h.mean(), rel=1e-4)
    assert means["rewards/accuracies"] == (h > 0).mean()
    assert means["logps/chosen"] == pytest.approx(chosen.mean(), rel=1e-4)
    assert means["logps/rejected"] == pytest.approx(rejected.mean(), rel=1e-4)
    assert means.get("kl") == (pytest.approx(kl, rel=1e-4) if loss == "kto" else None)
    assert set(task.columns) <= set(means)
    assert [task.weight(batch) for batch in batches] == [2, 1, 0]


def test_a_dummy_pair_has_a_graph_and_no_gradient():
    task = reference_task("dpo")
    policy = LanguageModel(causal_lm("llama"))
    (batch,) = task.prepare(policy, [task.collate([])])
    total, sums = task.loss(policy, batch)
    total.backward()
    assert float(total.detach()) == 0.0
    assert {float(value) for value in sums.values()} == {0.0}
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())


def with_dropout(seed: int) -> LanguageModel:
    """In training mode."""
    model = causal_lm("gpt2", seed)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    return LanguageModel(model).train()


@pytest.mark.parametrize("seeds", [(5, 0), (0, 5)])
def test_what_is_no_gradient_is_computed_without_dropout(seeds):
    """The reference's log-probs and KTO's reference point, which a policy that makes mismatched
    answers less likely leaves below 0.
    """
    policy, reference = map(with_dropout, seeds)
    task = PreferenceTask(RewardConfig(loss="kto"), reference)
    batch = task.collate([Pairs(ROWS, 20)[i] for i in range(3)])
    (found,) = task.prepare(policy, [batch])
    assert not found.ref_logps.requires_grad
    assert policy.training
    assert reference.training
    reference.eval()
    (expected,) = task.prepare(policy.eval(), [batch])
    assert torch.equal(found.ref_logps, expected.ref_logps)
    assert found.kl == expected.kl
    assert expected.kl > 0 if seeds == (5, 0) else expected.kl < 0


def test_missing_reference_log_probs_are_nan():
    """Without reference log-probs the loss is NaN, not wrong."""
    task = reference_task("dpo")
    total, _ = task.loss(LanguageModel(causal_lm("llama")), task.collate(ROWS))
    assert torch.isnan(total)


@pytest.mark.parametrize(
    ("case", "is_reference"),
    [
        (Case("dpo"), True),
        (Case("dpo", options=(("lora_dim", 4),)), False),
        (Case("dpo", options=(("lora_dim", 4), ("only_optimize_lora", False))), True),
        (Case("dpo", options=(("precompute_ref_logprobs", True),)), False),
    ],
    ids=str,
)
def test_the_reference_stays_while_the_policy_moves(case, is_reference, models_folder, tmp_path):
    """After steps the reference's log-probs are still those of the policy at the start."""
    engine, task, config, tables, _ = build_preference(case, models_folder, tmp_path)
    assert (task.reference is not None) == is_reference == config.loads_reference
    rows = [tables[0][i] for i in range(5)]

    def of_reference():
        (batch,) = task.prepare(engine, [task.collate(rows)])
        return batch.ref_logps

    def of_policy():
        with torch.no_grad():
            return answer_logps(engine, task.collate(rows).rows)

    start = of_policy()
    torch.testing.assert_close(of_reference(), start, atol=1e-4, rtol=1e-5)
    engine.train()
    for _ in range(2):
        loop.train_step(engine, task, rows, MicroBatchSize(5))
    torch.testing.assert_close(of_reference(), start, atol=1e-4, rtol=1e-5)
    assert (of_policy() - start).abs().max() > 0.01


def test_precomputed_log_probs_belong_to_their_rows(models_folder, tmp_path):
    """Whatever the micro-batches: 37 rows in batches of 5, the last with two, or by tokens."""
    case = Case("kto", options=(("precompute_ref_logprobs", True),))
    engine, task, _, (pairs, _), _ = build_preference(case, models_folder, tmp_path)
    exact = causal_lm("llama").double()
    assert len(pairs.ref_logps) == 37
    for i in (0, 4, 5, 36):
        row = pairs[i]
        expected = [
            logprob_by_hand(exact, row[block], row["prompt_length"])
            for block in (*BLOCKS, "mismatched_ids")
        ]
        assert row["ref_logps"] == pytest.approx(expected, rel=1e-4)
    first = list(pairs.ref_logps)
    for size in (MicroBatchSize(37), MicroBatchSize(1, tokens=60)):
        task.precompute(engine, pairs, size)
        np.testing.assert_allclose(pairs.ref_logps, first, rtol=1e-4)


# -- flags


def test_defaults():
    assert not RewardConfig().trains_policy
    assert RewardConfig(loss="kto").used_beta == 0.1
    assert RewardConfig(loss="kto", kto_undesirable_weight=2.0).kto_weights == (1.0, 2.0)
    lora = RewardConfig(loss="dpo", lora_dim=4)
    assert not lora.loads_reference
    assert replace(lora, only_optimize_lora=False).loads_reference


def test_a_line_tells_rewards_from_log_probs():
    """Both have a ``chosen``."""
    metrics = {
        "loss": 0.5,
        "rewards/margins": 1.0,
        "logps/chosen": -4.0,
        "eval/rewards/chosen": 2.0,
    }
    line = format_line("step", 1, 10, metrics, metrics)
    names = [word for word in line.split()[2:] if not word.lstrip("-").replace(".", "").isdigit()]
    assert names == ["loss", "margins", "logps/chosen", "rewards/chosen"]


@pytest.mark.parametrize("packing", ["on", "off"])
def test_unpaired_answers_weigh_as_much_as_answers_of_pairs(tmp_path, packing):
    """KTO's mean is over answers, however many are good: by hand, a sequence at a time."""
    rows = [
        {"prompt": "one", "completion": " yes", "label": True},
        {"prompt": "two", "completion": " no", "label": False},
        {"prompt": "three", "completion": " maybe so", "label": True},
        {"prompt": "four", "completion": " indeed", "label": True},
        {"prompt": "five", "completion": " " + "long" * 99, "label": False},  # dropped
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RewardConfig(
        loss="kto",
        beta=0.2,
        kto_undesirable_weight=1.5,
        data_path=[str(tmp_path / "rows.jsonl")],
        data_split="0,1,0",
        eval_fraction=0.0,
        max_seq_len=32,
    )
    tokenizer = tiny_tokenizer()
    table = preference_dataset(config, tokenizer)
    for row, made in zip(rows, table, strict=False):
        n, sides = made["prompt_length"], [made[side] for side in BLOCKS]
        whole, prompt = sides if row["label"] else reversed(sides)
        assert tokenizer.decode(prompt) == row["prompt"]
        assert whole[:n] == prompt
        answer = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"]]
        assert whole[n:] == [*answer, tokenizer.eos_token_id]
    assert len(table) == 4
    pairs = Pairs(table, config.max_seq_len)
    for i in range(4):
        assert len(pairs[i]["mismatched_ids"]) > pairs[i]["prompt_length"]

    policy = LanguageModel(causal_lm("llama", vocab_size=len(tokenizer)), packing)
    reference = LanguageModel(causal_lm("llama", seed=5, vocab_size=len(tokenizer)), packing)
    task = PreferenceTask(config, reference)
    parts = [task.collate([pairs[i] for i in part]) for part in ([0, 1], [2, 3])]
    batches, total, means = losses_of(task, policy, parts)
    _, good = logratios_by_hand(task, policy, [table[i] for i in (0, 2, 3)], BLOCKS[0])
    _, (bad,) = logratios_by_hand(task, policy, [table[1]], BLOCKS[1])
    kl = max(batches[0].kl, 0.0)
    expected = (1 / (1 + np.exp(0.2 * (good - kl)))).sum() + 1.5 / (1 + np.exp(0.2 * (kl - bad)))
    weight = sum(map(task.weight, batches))
    assert total / weight == pytest.approx(expected / 4, rel=1e-4)
    assert means["loss"] == pytest.approx(expected / 4, rel=1e-4)
    assert means["rewards/chosen"] == pytest.approx(0.2 * good.mean(), rel=1e-4)
    assert means["rewards/rejected"] == pytest.approx(0.2 * bad, rel=1e-4)
