"""Real weights: rollouts, and packed training rows, against transformers' own forward in fp32."""

import copy

import pytest
import torch
from families import assert_same_but_for_ties, logprob_gap, reference_logprobs

from dschat.inference import InferenceEngine, SamplingParams
from dschat.inference.protocol import Rollout
from dschat.models.heads import LanguageModel, ScoreModel
from dschat.models.packing import pack
from dschat.models.tokenizer import ensure_distinct_pad, num_ids, stop_ids, text_ids

pytestmark = pytest.mark.real

GAP = 1e-4
QUESTIONS = [
    "What is the capital of France?",
    "What is 45 plus 76? Answer with the number only.",
    "Write a short poem about the sea, in the style of a 東京 haiku.",
    "Hi",
]


@pytest.fixture(scope="module")
def prompts(tokenizer):
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True)
        for q in QUESTIONS
    ]
    return [chat["input_ids"] for chat in chats]


@pytest.fixture(scope="module")
def engine(checkpoint, tokenizer):
    """Small pages and steps: prompts are computed in parts, beside answers that decode."""
    sizes = {"page_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 128}
    sizes |= {"max_seq_len": 1024, "stop_ids": stop_ids(tokenizer)}
    return InferenceEngine.from_pretrained(checkpoint, **sizes)


def test_sampled_logprobs(engine, module, prompts, tokenizer):
    """Also behind a text that is longer than Gemma's window of 512 tokens."""
    text = " ".join(f"{i} is followed by {i + 1}." for i in range(100, 150))
    (long,) = text_ids(tokenizer, [text])
    assert 520 < len(long) < 900
    for asked, n in ((prompts, 2), ([long], 1)):
        sampling = SamplingParams(max_new_tokens=16, n=n, seed=3, temperature=0.9)
        rollout = engine.generate(asked, sampling)
        assert logprob_gap(module, asked, rollout, temperature=0.9) < GAP


@torch.no_grad()
def test_greedy_answers_are_those_of_generate(engine, module, prompts, tokenizer):
    """Token by token, until two tokens are as likely."""
    rollout = engine.generate(prompts, SamplingParams(max_new_tokens=16, temperature=0.0))
    ids, logprobs = [], []
    for prompt in prompts:
        out = module.generate(
            torch.tensor([prompt]),
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=list(stop_ids(tokenizer)),
        )
        ids.append(out[0, len(prompt) :].tolist())
        logprobs.append(reference_logprobs(module, prompt, ids[-1]).tolist())
    expected = Rollout(ids, logprobs, rollout.finish_reasons)
    assert_same_but_for_ties(rollout, expected, GAP)
    assert rollout.token_ids[0] == ids[0]


def test_each_prompt_alone_has_the_same_answer(engine, prompts):
    sampling = SamplingParams(max_new_tokens=8, temperature=0.0)
    together = engine.generate(prompts, sampling)
    for i, prompt in enumerate(prompts):
        alone = engine.generate([prompt], sampling)
        assert_same_but_for_ties(alone, [together[i]], GAP)


# -- training rows


@pytest.fixture(scope="module")
def rows(engine, prompts):
    """Two answers of each prompt, and the lengths of their prompts."""
    rollout = engine.generate(prompts, SamplingParams(max_new_tokens=12, n=2, seed=5))
    lengths = [len(prompts[i // 2]) for i in range(len(rollout))]
    return [prompts[i // 2] + ids for i, ids in enumerate(rollout.token_ids)], lengths


def reads_of(rows, lengths):
    return [range(n - 1, len(row) - 1) for row, n in zip(rows, lengths, strict=True)]


def test_packed_rows_are_single_rows(checkpoint, module, rows):
    """Log-probs and gradients of rows that share their prompts, of a model that `Checkpoint`
    loads.
    """
    model = LanguageModel(checkpoint.language_model(torch.float32, 0.0))
    model.check(torch.device("cpu"))
    packed = pack(rows[0], reads_of(*rows), rows[1])
    assert packed.num_tokens < 0.7 * sum(map(len, rows[0]))
    logprobs, _ = model(packed)
    expected = [reference_logprobs(module, row[:n], row[n:]) for row, n in zip(*rows, strict=True)]
    assert (logprobs - torch.cat(expected)).abs().max() < GAP
    (-logprobs.mean()).backward()
    ours = {name: p.grad for name, p in model.base.named_parameters()}
    # transformers trains no row of the embedding for the padding, which ends answers here
    module.get_input_embeddings().padding_idx = None
    own = copied_gradients(module, *rows)
    assert ours.keys() == own.keys()
    norm = torch.stack([g.norm() for g in own.values()]).norm()
    for name, gradient in own.items():
        assert (ours[name] - gradient).norm() < 5e-4 * norm, name  # fp32: 1.5e-4 seen


def copied_gradients(module, rows, lengths):
    """Of the same mean by transformers, row by row."""
    count = sum(len(row) - n for row, n in zip(rows, lengths, strict=True))
    for row, n in zip(rows, lengths, strict=True):
        ids = torch.tensor([row])
        logits = module(ids, use_cache=False, logits_to_keep=len(row) - n + 1).logits[0, :-1]
        values = logits.log_softmax(-1).gather(1, ids[0, n:, None])
        (-values.sum() / count).backward()
    gradients = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    return gradients


@torch.no_grad()
def test_scores_are_those_of_the_score_head(checkpoint, tokenizer, rows, tmp_path):
    """A new reward model, saved and loaded by transformers: padding in its batches changes none."""
    from transformers import AutoModelForSequenceClassification

    tokenizer = copy.deepcopy(tokenizer)
    ensure_distinct_pad(tokenizer)
    pad = tokenizer.pad_token_id
    module = checkpoint.score_model(
        torch.float32, pad, from_base=True, num_tokens=num_ids(tokenizer)
    )
    scores = ScoreModel(module)(pack(rows[0], [[len(row) - 1] for row in rows[0]], rows[1]))
    module.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    width = max(map(len, rows[0]))
    padded = torch.tensor([row + [pad] * (width - len(row)) for row in rows[0]])
    mask = (torch.arange(width) < torch.tensor([[len(row)] for row in rows[0]])).long()
    expected = loaded(padded, attention_mask=mask).logits[:, 0]
    assert (scores - expected).abs().max() < GAP
