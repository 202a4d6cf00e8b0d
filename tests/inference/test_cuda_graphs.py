"""Captured decode steps: padding, buckets and fallbacks, with a recorder that needs no GPU."""

import gc
import logging
import weakref
from dataclasses import replace

import pytest
import torch
from captures import again, captured_by, graphs_of, on_graphs, steps_of, use
from families import build, empty_engine, engine
from quick import slow

from dschat.config.errors import UserError
from dschat.inference import SamplingParams
from dschat.inference.kernels.cuda import operators
from dschat.inference.model.step_kernels import StepKernels
from dschat.inference.requests.cuda_graphs import batch_bucket

PROMPTS = [[(5 * i + j) % 50 + 3 for j in range(n)] for i, n in enumerate([5, 17, 1, 30, 9, 2, 8])]
SAMPLING = SamplingParams(max_new_tokens=20, n=2, seed=4)


@pytest.mark.parametrize("name", [*slow(["llama", "bloom"]), "mistral"])
def test_steps_read_few_pages_of_short_rows(name, monkeypatch, module_of):
    use(monkeypatch, fewest_tokens=8)
    made, plain = (f(module_of(name), page_size=2) for f in (on_graphs, engine))
    for _ in range(2):
        expected = plain.generate(PROMPTS, SAMPLING)
        assert made.generate(PROMPTS, SAMPLING).token_ids == expected.token_ids
    pages = {pages for _, pages, *_ in steps_of(made)}
    assert pages <= {4, 8, 16, 24, 32}  # the longest prompt has 15, the longest sequence 25
    assert len(pages) > 1


def test_the_kernel_s_steps_are_captured_once(monkeypatch, module_of):
    """It reads lengths: one graph for all of them."""
    use(monkeypatch, fewest_tokens=8)
    made = engine(module_of("llama"), page_size=2)
    graphs = graphs_of(captured_by(made, again, StepKernels(torch.device("cpu"))))
    assert graphs.pages_for(1) == graphs.state.num_pages


@pytest.mark.parametrize("page_size", [*slow([None]), 4])
def test_graphs_made_in_inference_mode_run_outside_it(page_size, module_of):
    made = on_graphs(module_of("llama"), page_size=page_size)
    with torch.inference_mode():
        expected = made.generate(PROMPTS, SAMPLING)
        graphs = graphs_of(made)
    assert made.generate(PROMPTS, SAMPLING).token_ids == expected.token_ids
    assert graphs_of(made) is graphs


def test_graphs_live_as_long_as_what_they_read(module_of):
    module = module_of("llama")
    made, graphs = on_graphs(module), []
    for release in (None, None, made.release_cache, made.release_weights):
        if release is not None:
            release()
        made.weights.load(module.named_parameters())
        made.generate(PROMPTS, SAMPLING)
        graphs.append(graphs_of(made))
    assert graphs[1] is graphs[0]  # refreshed in place
    assert graphs[2] is not graphs[1]
    assert graphs[3] is not graphs[2]


def test_graphs_of_borrowed_weights_that_moved_are_not_replayed():
    module = build("llama")
    made, graphs = captured_by(empty_engine(module.config), again), []
    for moves in (False, False, True):
        for parameter in module.parameters() if moves else ():
            parameter.data = parameter.data.clone()
        is_borrowed = made.borrow_weights(dict(module.named_parameters()))
        assert is_borrowed == (moves or not graphs)
        made.generate(PROMPTS, SAMPLING)
        graphs.append(graphs_of(made))
    assert graphs[1] is graphs[0]
    assert graphs[2] is not graphs[1]


def test_where_capturing_fails_decoding_goes_on(module_of, caplog):
    def refuse(step):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    made = on_graphs(module_of("llama"), refuse)
    expected = engine(module_of("llama")).generate(PROMPTS, SAMPLING)
    with caplog.at_level(logging.WARNING, logger="dschat"):
        for _ in range(2):
            assert made.generate(PROMPTS, SAMPLING).token_ids == expected.token_ids
    (line,) = [r.getMessage() for r in caplog.records]
    assert "decoding eagerly: operation not permitted" in line
    assert "\n" not in line


def weakly(step):
    """As a CUDA graph, a replay refers to no object of ours."""
    run, args = weakref.WeakMethod(step.func), step.args
    return lambda: run()(*args)


def refusing(step):
    raise RuntimeError("not here")


@pytest.mark.parametrize("capture", [weakly, refusing])
def test_a_released_cache_is_free_at_once(capture, module_of):
    """Not when Python next looks for cycles: training needs the memory."""
    made = on_graphs(module_of("llama"), capture, page_size=4)
    stream = made.stream(PROMPTS[0], replace(SAMPLING, n=1))
    next(stream)
    stream.close()  # with steps under way
    made.generate(PROMPTS, SAMPLING)
    cached = weakref.ref(made.cache.pairs)
    gc.collect()
    gc.disable()
    try:
        made.release_cache()
        assert cached() is None
    finally:
        gc.enable()


class CompilationError(Exception):
    """As Triton's, which is no RuntimeError."""


@pytest.mark.parametrize("graphs_fail_too", [*slow([False]), True])
def test_where_kernels_fail_decoding_goes_on_without(
    graphs_fail_too, caplog, module_of, monkeypatch
):
    def refuse(*args, **options):
        raise CompilationError("at 34:42: no attribute\nmore")

    def capture(step):
        step()  # the warm-up
        if graphs_fail_too:
            raise RuntimeError("not permitted")
        return step

    kernels = StepKernels(torch.device("cpu"))
    monkeypatch.setattr(operators, "read_rows", refuse)
    made = captured_by(engine(module_of("llama"), page_size=4), capture, kernels)
    expected = engine(module_of("llama"), page_size=4).generate(PROMPTS, SAMPLING)
    with caplog.at_level(logging.WARNING, logger="dschat"):
        for _ in range(2):
            assert made.generate(PROMPTS, SAMPLING).token_ids == expected.token_ids
    messages = [r.getMessage() for r in caplog.records]
    assert "by Triton kernels failed, going on without them: at 34:42: no attribute" in messages[0]
    assert len(messages) == 1 + graphs_fail_too
    assert graphs_of(made).failed == graphs_fail_too
    assert (len(steps_of(made)) > 0) != graphs_fail_too


def test_required_graphs_need_no_kernels(module_of):
    """Only a step that cannot be captured without them either is an error."""
    kernels = StepKernels(torch.device("cpu"))
    places = ("prompts", "by kernels", "by torch")
    errors = [UserError(f"cuda_graphs: {place}") for place in places]

    def capture(step):
        if errors:
            raise errors.pop(0)
        return step

    made = captured_by(engine(module_of("llama"), page_size=4), capture, kernels)
    with pytest.raises(UserError, match="by torch"):
        made.generate(PROMPTS, SAMPLING)
    errors += [UserError(f"cuda_graphs: {place}") for place in places[:2]]
    made = captured_by(engine(module_of("llama"), page_size=4), capture, kernels)
    expected = engine(module_of("llama"), page_size=4).generate(PROMPTS, SAMPLING)
    assert made.generate(PROMPTS, SAMPLING).token_ids == expected.token_ids


def test_buckets():
    assert [batch_bucket(n, 256) for n in (1, 3, 5, 16, 17, 200)] == [1, 4, 8, 16, 24, 256]
    assert batch_bucket(5, 6) == 6
    # Long sequences of short pages: not a graph for every page.
    assert [batch_bucket(n, 2500) for n in (1024, 1025, 1700, 2049)] == [1024, 2048, 2048, 2500]
