"""Prompts by captured steps: here frozen operators, which keep the numbers that the host had."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from captures import again, captured_by, on_graphs
from families import assert_same, engine
from quick import slow
from soft_graph import operators_only, soft_capture

from dschat.inference import SamplingParams
from dschat.inference.requests.sequence import Request, StepSchedule
from dschat.inference.requests.step_runner import PaddedShape, PromptGraphs, length_bucket

PROMPTS = [[(5 * i + j) % 50 + 3 for j in range(n)] for i, n in enumerate([15, 9, 30])]
SAMPLING = SamplingParams(max_new_tokens=3, seed=4)


def shapes(made):
    """Those that were captured."""
    return list(made.step_runner().prompts.steps)


@pytest.mark.parametrize("name", ["mistral", *slow(["llama", "opt", "bloom", "gpt_oss", "gemma2"])])
def test_prompts_of_one_shape_share_a_graph(name, module_of):
    """Of one number and about one length; ids, lengths and pages are data."""
    module = module_of(name)
    plain = engine(module, page_size=4)
    with operators_only():
        made = on_graphs(module, soft_capture, page_size=4)
        for prompts in (PROMPTS, [p[1:] for p in PROMPTS], PROMPTS[::-1]):
            expected = plain.generate(prompts, SAMPLING)
            assert_same(made.generate(prompts, SAMPLING), expected, 1e-4)
    if module.config.model_type != "gpt_oss":  # counts each expert's rows on the host
        assert shapes(made) == [PaddedShape(4, 32)]


def test_what_is_captured(module_of):
    made = on_graphs(module_of("llama"), page_size=4)
    wide = SimpleNamespace(spec=replace(made.spec, hidden_size=1 << 14), weights=made.weights)
    graphs = made.step_runner().prompts

    def shape_for(*sizes, computed=0, graphs=graphs):
        chunks = []
        for size in sizes:
            (sequence,) = Request(list(range(3, size + 3)), SAMPLING).sequences
            sequence.computed = computed
            chunks.append((sequence, size - computed))
        return graphs.shape_for(StepSchedule([], chunks))

    assert shape_for(30, 20) == PaddedShape(2, 32)
    assert shape_for(33) == PaddedShape(1, 48)
    assert shape_for(300, *[10] * 7) is None  # padding, for the most part
    assert shape_for(30, computed=10) is None  # its first tokens are cached
    of_wide = PromptGraphs(wide, made.cache, 8, again, None)
    assert shape_for(30, 20, graphs=of_wide) is None  # the device takes longer than the host
    assert [length_bucket(n) for n in (1, 16, 17, 257, 500, 1030)] == [16, 16, 32, 288, 512, 1152]


def test_where_prompts_are_not_captured_they_are_computed(module_of, caplog):
    def capture(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    caplog.set_level(logging.INFO, logger="dschat")
    made = captured_by(engine(module_of("llama")), capture)
    plain = engine(module_of("llama"))
    for prompts in (PROMPTS, PROMPTS[:1]):
        expected = plain.generate(prompts, SAMPLING)
        assert made.generate(prompts, SAMPLING).token_ids == expected.token_ids
    assert shapes(made) == []
    assert caplog.text.count("are not captured: operation not permitted") == 1
