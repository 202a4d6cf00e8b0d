"""The parity ladder on a live actor: the generator has the weights of training, on any layout.

Every family x ZeRO 0/2/3 x TP 1/2 x LoRA off/merged/beside, after three optimizer steps: log-probs
of the rollout against the training form's own forward. TP 2, and ZeRO-3's shards, on two ranks. The
quick suite takes, of a selection with every pair of values of the four, a quarter of what runs on
one process and one of ZeRO-3 on two; all of it is marked slow.
"""

import itertools
import math

import pytest
from quick import slow, some
from step_cases import Case
from test_same_losses import by_name

GAP = 1e-4  # of fp32 log-probs
GAPS = {"qwen3_5_text": 3e-4, "kimi_linear": 3e-4}  # a decode sums in another order
FAMILIES = ("opt", "opt_350m", "gpt2", "gpt_neox", "bloom", "llama", "mistral", "qwen2", "qwen3")
FAMILIES += ("qwen3_moe", "gemma3", "gpt_oss")
# Tied or biased heads, one key-value head, multipliers, experts; norms of every kind.
OTHERS = ("arcee", "biogpt", "cohere", "ernie4_5", "exaone4", "granitemoe", "helium", "nemotron")
OTHERS += ("olmoe", "phi", "stablelm", "starcoder2", "dots1", "minimax_m2", "qwen2_moe")
OTHERS += ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")
OTHERS += ("ernie4_5_moe", "persimmon", "hunyuan_v1_dense", "afmoe", "laguna")
OTHERS += ("lfm2", "lfm2_moe", "qwen3_5_text", "granitemoehybrid", "jamba", "kimi_linear")
STAGES, TP_SIZES, LORA = (0, 2, 3), (1, 2), ("off", "merge", "side")
AXES = (FAMILIES, STAGES, TP_SIZES, LORA)


def ladder(family, stage, tp_size, lora, **more):
    options = {"tp_size": tp_size, "lora": lora} | more
    return Case("parity", stage, model=family, options=tuple(options.items()))


def on_two_ranks(case):
    """Partitioned weights or a partitioned rollout. One process has ZeRO-3's weights whole."""
    options = dict(case.options)
    is_partitioned = case.zero == 3 and options.get("layout") != "zero_copy"
    return is_partitioned or options["tp_size"] == 2


PRODUCT = list(itertools.product(*AXES))
# A Latin square of family and stage gives LoRA and TP size.
PAIRWISE = [
    (family, stage, TP_SIZES[(i + j) % 2], LORA[(i + j) % 3])
    for i, family in enumerate(FAMILIES)
    for j, stage in enumerate(STAGES)
]
QUICK = [ladder(*point) for point in PAIRWISE]
# Training's own storage, for each layout of a fused weight; shards that live in CPU memory.
QUICK += [
    ladder(family, stage, 1, lora, layout="zero_copy")
    for family, stage, lora in (
        ("gpt2", 0, "side"),
        ("gpt_neox", 2, "off"),
        ("bloom", 1, "side"),
        ("llama", 2, "side"),
        ("opt", 1, "off"),
    )
]
QUICK += [
    ladder("llama", 3, 1, "off", offload="parameters"),
    ladder("mistral", 2, 1, "off", offload="optimizer"),
]
ALL = [ladder(*point) for point in PRODUCT]
ALL += [ladder(family, 3, 2, "off") for family in OTHERS]
ALL += [ladder(family, 2, 1, "side", layout="zero_copy") for family in OTHERS]
ALL += [
    ladder(family, stage, 1, lora, layout="zero_copy")
    for family, stage, lora in itertools.product(FAMILIES, STAGES + (1,), ("off", "side"))
]
ALL += [ladder(*point, offload="optimizer") for point in PRODUCT if point[1:3] == (2, 1)]
ALL += [ladder(*point, offload="parameters") for point in PRODUCT if point[1:3] == (3, 2)]
ALL += [ladder("mixtral", 3, 2, lora) for lora in LORA]
REST = [case for case in ALL if case not in QUICK]


def test_the_selection_has_every_pair():
    for a, b in itertools.combinations(range(len(AXES)), 2):
        pairs = {(point[a], point[b]) for point in PAIRWISE}
        assert pairs == set(itertools.product(AXES[a], AXES[b]))


def check(case, result):
    assert result["gap"] < GAPS.get(case.model, GAP)
    assert result["moved"] > 0.1  # older weights would have shown
    first, later, again = result["refreshes"]
    every, adapters = result["model_bytes"], result["adapter_bytes"]
    options = dict(case.options)
    assert (adapters > 0) == (options["lora"] != "off")
    # What is read: all of it, adapters beside a frozen base after the first time, or nothing.
    per_version = adapters if options["lora"] == "side" else every
    if options.get("layout") == "zero_copy":
        every = per_version = adapters
    assert (first["bytes"], later["bytes"], again["bytes"]) == (every, per_version, 0)
    assert again["seconds"] == 0
    for refresh in (later, again):  # the first one makes the memory that ranks share
        assert refresh["calls"] == refresh["collectives"]  # counted on the wire


def selected(two_ranks):
    cases = [case for case in QUICK if on_two_ranks(case) == two_ranks]
    rest = [case for case in REST if on_two_ranks(case) == two_ranks]
    # Each on two takes both cores for a second: one of ZeRO-3.
    return some(cases, cases[1:2] if two_ranks else cases[::4]) + slow(rest)


@pytest.mark.parametrize("case", selected(two_ranks=False), ids=by_name)
def test_one_process(case, run_here):
    result, _ = run_here(case)
    check(case, result)
    assert all(refresh["collectives"] == 0 for refresh in result["refreshes"])


@pytest.mark.slow
@pytest.mark.parametrize("lora", LORA)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_under_zero_3(family, lora, run_here):
    case = ladder(family, 3, 1, lora)
    check(case, run_here(case)[0])


@pytest.mark.dist
@pytest.mark.parametrize(
    "case",
    slow(
        [
            ladder("opt", 2, 1, "off", layout="zero_copy"),
            ladder("llama", 2, 1, "side", layout="zero_copy"),
        ]
    ),
    ids=by_name,
)
def test_two_ranks_that_have_the_weights_whole(case, two_processes):
    result, _ = two_processes(case)
    check(case, result)
    assert [refresh["collectives"] for refresh in result["refreshes"]] == [0, 0, 0]


@pytest.mark.dist
@pytest.mark.parametrize("case", selected(two_ranks=True), ids=by_name)
def test_two_ranks(case, two_processes):
    result, _ = two_processes(case)
    check(case, result)
    # Two or three layers are one bucket; LoRA's factors are another.
    sharded = {"off": [1, 1, 0], "merge": [2, 2, 0], "side": [2, 1, 0]}[dict(case.options)["lora"]]
    expected = sharded if case.zero == 3 else [0, 0, 0]
    assert [refresh["collectives"] for refresh in result["refreshes"]] == expected


# -- the same answers on any number of ranks -------------------------------------------------------


def shared(shares, zero=0, model="llama", **options):
    return Case("answers", zero, model=model, shares=shares, options=tuple(options.items()))


PRESSED = {"page_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 9}
SHARES = [
    shared((1, 7), tp_size=2, zero=3, **PRESSED),
]
SHARES += slow(
    [
        shared((5, 0), tp_size=1, **PRESSED),
        shared((3, 5), zero=3),
        shared((1, 7), tp_size=1),
        shared((5, 0), tp_size=2),
    ]
)
SHARES += slow(
    [
        shared(shares, zero, tp_size=tp_size, **knobs)
        for shares in ((4, 4), (0, 5), (8, 0), (7, 1))
        for zero in (0, 3)
        for tp_size in (1, 2)
        for knobs in ({}, PRESSED)
    ]
)
SHARES += slow(
    [
        shared((3, 5), 3, model, tp_size=2, **knobs)
        for model in ("mixtral", "qwen3_moe", "gpt_oss")
        for knobs in ({}, PRESSED)
    ]
)


@pytest.mark.dist
@pytest.mark.parametrize("case", SHARES, ids=by_name)
def test_sampled_answers_are_those_of_one_process(case, two_processes, run_here):
    """Each rank gets the answers of its prompts, and at TP 1 does not wait for the other."""
    (alone,) = run_here(shared((), model=case.model))[0]["ranks"]
    result, _ = two_processes(case)
    assert alone[0] == alone[2]
    lengths = {len(ids) for ids in alone[0][0]}
    assert len(lengths) > 1  # answers end at different times
    first = 0
    for share, rounds in zip(case.shares, result["ranks"], strict=True):
        for n, got, expected in zip((2, 1, 2), rounds, alone, strict=True):
            mine = slice(n * first, n * (first + share))
            assert got == [part[mine] for part in expected]
        first += share
    if dict(case.options).get("tp_size", 1) == 1:
        assert result["wire"] == [[[], [], []]] * 2


# -- what a rank holds -----------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize(
    "case",
    slow([Case("bytes", 3, model="large_opt"), Case("bytes", 0, model="large_llama")]),
    ids=by_name,
)
def test_two_ranks_hold_half_each(case, two_processes):
    """Of 1,001 tokens' rows too: the second rank's last one is padding."""
    result, _ = two_processes(case)
    one, two = result["1"], result["2"]
    assert one[0]["weights"] >= result["model_bytes"]
    for rank in (0, 1):
        assert two[rank]["answers"] == one[rank]["answers"] == one[0]["answers"]
        assert two[rank]["pages"] == one[rank]["pages"]
        assert two[rank]["weights"] <= 0.51 * one[rank]["weights"]
        assert two[rank]["cache"] <= 0.51 * one[rank]["cache"]
    assert sum(held["weights"] for held in two) >= one[0]["weights"]  # and nothing is missing


# -- what a refresh takes --------------------------------------------------------------------------


def buckets(layers):
    return Case("buckets", 3, model="large_llama", options=(("layers_per_bucket", layers),))


@pytest.mark.dist
@pytest.mark.parametrize("case", slow([buckets(3), buckets(1)]), ids=by_name)
def test_a_refresh_takes_one_collective_and_the_memory_of_one_bucket(case, two_processes):
    """Whatever the answers' length. Beside the bucket there is the fused weight that is being
    written."""
    result, _ = two_processes(case)
    layer, every, num_layers = result["layer_bytes"], result["model_bytes"], 8
    embedding, gate_and_up, vectors = 4 * 1001 * 256, 4 * 1024 * 256, 2**14
    assert every == pytest.approx(num_layers * layer + 2 * embedding, rel=0.01)
    layers = dict(case.options)["layers_per_bucket"]
    count = math.ceil(num_layers / layers)
    for rollout in result["rollouts"]:
        assert rollout["bytes"] == every
        assert (rollout["collectives"], rollout["calls"], rollout["rollout"]) == (count,) * 3
    largest = layers * layer + embedding
    assert layers * layer <= result["peak"] <= largest + embedding + gate_and_up + vectors


# -- refusals on two ranks -------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("case", [Case("refusals")], ids=by_name)
def test_what_two_ranks_cannot_share_is_refused_in_one_line(case, two_processes):
    said, _ = two_processes(case)
    assert said["world"].startswith("--inference_tp_size 3 does not divide the 2 processes; choose")
    assert said["heads"] == "--inference_tp_size 2 does not divide the model's 1 key-value heads"
    assert said["zero_copy"].startswith("--rollout_layout zero_copy needs whole weights")
    assert "--inference_tp_size 1" in said["zero_copy"]
    assert said["partitions"] == said["zero_copy"]
    assert said["family"].startswith(
        "--inference_tp_size 2: CodeGenForCausalLM: values are not those of a linear layer"
    )
    assert "NemotronHForCausalLM: not every layer has one attention" in said["states"]
    assert "NaN or infinite (in float32) in 1 weights, such as model.layers.1.mlp" in said["nan"]
    assert not any("\n" in message for message in said.values())
