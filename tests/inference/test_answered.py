"""Every generator reports each prompt once, when all of its answers are complete."""

import pytest
import torch
from captures import on_graphs
from families import EOS, PROMPTS, cache_gib, empty_engine, engine, stream
from rank_threads import on_ranks

from dschat.inference import SamplingParams
from dschat.inference.generators.hf_generator import HuggingFaceGenerator
from dschat.rlhf.rollout_policies import OpenPrompt, advance

SAMPLING = SamplingParams(max_new_tokens=16, n=2, seed=3)
LIMITS = [16, 3, 16, 5, 1, 9, 16, 2]


class Reports(list):
    """What was reported: rows and their answers."""

    def __call__(self, row, answers):
        self.append((row, answers))

    def check(self, rollout, n=2):
        assert sorted(row for row, _ in self) == list(range(len(rollout) // n))
        for row, answers in self:
            assert answers == rollout.part(row * n, row * n + n)


def tight(module):
    gib = cache_gib(engine(module), 80)
    return engine(module, kv_cache_gib=gib, page_size=4, max_num_seqs=3)


@pytest.mark.parametrize("make", [engine, on_graphs, tight], ids=["eager", "graphs", "tight"])
def test_prompts_are_reported_as_they_complete(make, module_of):
    made, reports, drawn = make(module_of("llama")), Reports(), []

    def answered(row, answers):
        reports(row, answers)
        drawn.append(made.stats.answer_tokens)

    got = made.generate(PROMPTS, SAMPLING, max_new_tokens=LIMITS, answered=answered)
    reports.check(got)
    assert len(set(drawn)) >= 6  # several prompts may end with one step


def test_each_rank_reports_its_own(module_of):
    module = module_of("llama")
    shares = [range(3), range(3, 8)]

    def work(member):
        made, reports = empty_engine(module.config, group=member), Reports()
        made.weights.load(stream(module))
        mine = list(shares[member.rank])
        prompts = [PROMPTS[i] for i in mine]
        reports.check(made.generate(prompts, SAMPLING, mine, answered=reports))
        opened = [OpenPrompt(ids) for ids in prompts]
        for wanted in (2, 3):
            reports = Reports()
            advance(made, opened, SAMPLING, mine, wanted, answered=reports)
            complete = [row for row, prompt in enumerate(opened) if prompt.is_complete]
            assert sorted(row for row, _ in reports) == complete
            for row, answers in reports:
                assert answers.token_ids == opened[row].token_ids
        return len(reports)

    assert all(count >= 3 for count in on_ranks(2, work))


@torch.no_grad()
def test_a_hugging_face_module_reports_lengths_one_by_one(module_of):
    made = HuggingFaceGenerator(module_of("llama"), (EOS,))
    reports = Reports()
    reports.check(made.generate(PROMPTS, SAMPLING, answered=reports))
    lengths = [len(PROMPTS[row]) for row, _ in reports]
    assert list(dict.fromkeys(lengths)) == list(dict.fromkeys(map(len, PROMPTS)))
    assert lengths == sorted(lengths, key=lengths.index)
