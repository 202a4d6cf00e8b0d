"""The sides of `rollout.py`, on one module: dschat's engine, transformers' `generate`, vLLM.

Every `run` answers the prompts of the case once and returns its `Timing`.
"""

from dataclasses import dataclass

import torch
from report import clock, rounded
from rollout_workloads import MODELS, Case
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from dschat.hybrid.rollout_form import RolloutSettings
from dschat.hybrid.vllm_rollout import VLLMRollout, installed_release
from dschat.hybrid.weight_stream import weight_stream
from dschat.inference import EngineConfig, InferenceEngine, SamplingParams

RATES = ("tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s")


@dataclass
class Timing:
    """One call: seconds of the call and of its prefill, and the tokens of each part."""

    wall_s: float
    prefill_s: float
    prompt_tokens: int
    answer_tokens: int
    decode_tokens: int

    @classmethod
    def apart(cls, case: Case, wall_s: float, prefill_s: float, answer_tokens: int) -> "Timing":
        """Of a call whose prefill was timed in another one, with the first tokens of answers."""
        decoded = answer_tokens - case.prompts * case.samples
        return cls(wall_s, prefill_s, case.prompts * case.prompt_tokens, answer_tokens, decoded)

    def rates(self) -> dict[str, float]:
        """Tokens per second, by the names in ``RATES``."""
        # With noise, a separately timed prefill can exceed the whole call. The rate is absurd then;
        # the median over rounds ignores it.
        decode_s = max(self.wall_s - self.prefill_s, 1e-9)
        values = (
            self.answer_tokens / self.wall_s,
            self.prompt_tokens / self.prefill_s,
            self.decode_tokens / decode_s,
        )
        return dict(zip(RATES, values, strict=True))


def make_module(case: Case, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The case's model with random weights and without EOS."""
    torch.manual_seed(0)
    with device:
        module = AutoModelForCausalLM.from_config(MODELS[case.model](), dtype=dtype)
    # NOTE: eos_token_id=None in a call of `generate` would mean the model's EOS.
    module.generation_config.eos_token_id = None
    return module.eval().requires_grad_(False)


def make_prompts(case: Case, vocab_size: int) -> Tensor:
    """(prompts, prompt tokens) of int64, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocab_size, (case.prompts, case.prompt_tokens), generator=generator)


def sampling_of(case: Case, seed: int, samples: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=case.new_tokens,
        temperature=case.temperature,
        n=samples,
        seed=seed,
        ignore_eos=True,
    )


class EngineSide:
    """dschat's engine with the weights of ``module``."""

    def __init__(self, case: Case, module: nn.Module, device: torch.device) -> None:
        self.case, self.device = case, device
        self.engine = InferenceEngine(
            module.config,
            module.dtype,
            device,
            EngineConfig(max_num_seqs=case.slots, max_seq_len=case.prompt_tokens + case.new_tokens),
        )
        started = clock(device)
        self.engine.weights.load(weight_stream(module, device))
        self.fill_s = clock(device) - started
        self.prompts = make_prompts(case, module.config.vocab_size).tolist()
        self.lengths = case.lengths()

    def run(self, seed: int) -> Timing:
        case = self.case
        sampling = sampling_of(case, seed, case.samples)
        started = clock(self.device)
        rollout = self.engine.generate(self.prompts, sampling, max_new_tokens=self.lengths)
        wall_s = clock(self.device) - started
        expected = [length for length in self.lengths for _ in range(case.samples)]
        assert [len(answer) for answer in rollout.token_ids] == expected
        stats = self.engine.stats
        return Timing(
            wall_s,
            stats.prefill_s,
            case.prompts * case.prompt_tokens,
            rollout.num_tokens,
            stats.decode_tokens,
        )

    def facts(self) -> dict:
        """Statistics of the last call."""
        stats = self.engine.stats
        return {
            "backends": sorted({*self.engine.weights.backends.values()}),
            "fill_s": rounded(self.fill_s),
            "page_size": self.engine.page_size,
            "prefill_tokens": stats.prefill_tokens,
            "prefill_steps": stats.prefill_steps,
            "decode_steps": stats.decode_steps,
            "decode_step_ms": rounded(1e3 * stats.decode_s / max(stats.decode_steps, 1)),
            "occupancy": rounded(stats.occupancy),
            "cache_use": rounded(stats.cache_use),
            "preemptions": stats.preemptions,
        }


class VLLMSide:
    """vLLM in this process, as ``--rollout_backend vllm`` runs it."""

    def __init__(self, case: Case, module: nn.Module, device: torch.device) -> None:
        self.case, self.device = case, device
        seq_len = case.prompt_tokens + case.new_tokens
        sizes = EngineConfig(max_num_seqs=case.slots, max_seq_len=seq_len)
        settings = RolloutSettings(module.dtype, sizes)
        form = VLLMRollout(module, module.config, settings)
        self.generator = form.enter(0)
        self.fill_s = form.last_refresh.seconds
        self.prompts = make_prompts(case, module.config.vocab_size).tolist()
        self.lengths = case.lengths()

    def run(self, seed: int) -> Timing:
        case = self.case
        prefill_s = self._generate(seed, [1] * case.prompts, samples=1)
        wall_s = self._generate(seed + 1, self.lengths, case.samples)
        return Timing.apart(case, wall_s, prefill_s, case.samples * sum(self.lengths))

    def _generate(self, seed: int, lengths: list[int], samples: int) -> float:
        sampling = sampling_of(self.case, seed, samples)
        self.generator.forget_prefixes()
        started = clock(self.device)
        rollout = self.generator.generate(self.prompts, sampling, max_new_tokens=lengths)
        seconds = clock(self.device) - started
        assert rollout.num_tokens == samples * sum(lengths)
        return seconds

    def facts(self) -> dict:
        return {"release": installed_release(), "fill_s": rounded(self.fill_s)}


class LengthPerRow(StoppingCriteria):
    """Stops every row at its own length; `generate` returns after the last one."""

    def __init__(self, prompt_tokens: int, lengths: Tensor) -> None:
        self.ends = prompt_tokens + lengths  # (B,)

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        return input_ids.shape[1] >= self.ends  # (B,) of bool


class GenerateSide:
    """transformers' `generate`, in batches of as many answers as the engine has slots."""

    def __init__(self, case: Case, module: nn.Module, device: torch.device) -> None:
        self.case, self.module, self.device = case, module, device
        self.batch = case.slots // case.samples  # prompts
        self.prompts = make_prompts(case, module.config.vocab_size).to(device)
        self.lengths = torch.tensor(case.lengths(), device=device)

    def run(self, seed: int) -> Timing:
        case = self.case
        torch.manual_seed(seed)
        prefill_s = self._generate(new_tokens=1)
        wall_s = self._generate(case.new_tokens)
        return Timing.apart(case, wall_s, prefill_s, case.samples * int(self.lengths.sum()))

    def _generate(self, new_tokens: int) -> float:
        """Seconds to answer all prompts with at most ``new_tokens`` each."""
        case = self.case
        options = {
            "do_sample": case.temperature > 0,
            "max_new_tokens": new_tokens,
            "num_return_sequences": case.samples,
            "pad_token_id": 1,
        }
        if case.temperature > 0:
            options |= {"temperature": case.temperature, "top_k": 0, "top_p": 1.0}
        started = clock(self.device)
        shapes = []
        batches = zip(self.prompts.split(self.batch), self.lengths.split(self.batch), strict=True)
        for ids, lengths in batches:
            criteria = StoppingCriteriaList()
            if case.ragged:
                criteria.append(LengthPerRow(case.prompt_tokens, lengths))
            output = self.module.generate(
                ids, attention_mask=torch.ones_like(ids), stopping_criteria=criteria, **options
            )
            shapes.append((output.shape[1], lengths))
        seconds = clock(self.device) - started
        for width, lengths in shapes:
            assert width == case.prompt_tokens + min(new_tokens, int(lengths.max()))
        return seconds

    def facts(self) -> dict:
        """Statistics of every call."""
        case = self.case
        return {
            "attention": self.module.config._attn_implementation,
            "prefill_tokens": case.prompts * case.samples * case.prompt_tokens,
            "decode_steps": sum(int(part.max()) - 1 for part in self.lengths.split(self.batch)),
        }
