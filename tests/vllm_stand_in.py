"""A package with the calls of vLLM 0.32 that dschat makes, on a transformers model without a cache.

Arguments that vLLM does not have are errors here too. Requests advance one token a step, and those
that are added last end first.
"""

import dataclasses
import enum
import sys
import types

import torch
from transformers import AutoConfig, AutoModelForCausalLM


class RequestOutputKind(enum.Enum):
    FINAL_ONLY = 2


@dataclasses.dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    logit_bias: dict[int, float] | None = None


class _Finalizer:
    atexit = True


class Engine:
    def __init__(self, folder, mode, max_model_len):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(99)
            config = AutoConfig.from_pretrained(folder)
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.engine_core = types.SimpleNamespace(_finalizer=_Finalizer())
        self._mode, self._max_model_len, self._requests = mode, max_model_len, {}
        self.prefix_cache_is_stale, self.slept = False, []

    def add_request(self, request_id, prompt, params):
        assert params.output_kind is RequestOutputKind.FINAL_ONLY
        assert request_id not in self._requests
        assert not self.prefix_cache_is_stale
        ids = prompt["prompt_token_ids"]
        assert len(ids) + params.max_tokens <= self._max_model_len
        draw = torch.Generator().manual_seed(params.seed)
        self._requests[request_id] = ids, params, [], [], draw

    def has_unfinished_requests(self):
        return bool(self._requests)

    @torch.no_grad()
    def step(self):
        outputs = []
        for name in reversed(list(self._requests)):
            ids, params, answer, logprobs, draw = self._requests[name]
            raw = self.model(torch.tensor([ids + answer])).logits[0, -1]
            logits = raw.clone()
            for token, bias in (params.logit_bias or {}).items():
                logits[token] += bias
            if len(answer) < params.min_tokens:
                logits[params.stop_token_ids] = -torch.inf
            logits /= params.temperature or 1
            shown = raw if self._mode == "raw_logprobs" else logits
            probs = logits.softmax(-1)
            token = int(probs.argmax())
            if params.temperature:
                token = int(torch.multinomial(probs, 1, generator=draw))
            answer.append(token)
            value = float(shown.log_softmax(-1)[token])
            logprobs.append({token: types.SimpleNamespace(logprob=value)})
            reason = "stop" if token in params.stop_token_ids else "length"
            if reason == "stop" or len(answer) == params.max_tokens:
                one = types.SimpleNamespace(
                    token_ids=answer, logprobs=logprobs, finish_reason=reason
                )
                outputs.append(types.SimpleNamespace(request_id=name, finished=True, outputs=[one]))
                del self._requests[name]
        return outputs

    def collective_rpc(self, method, *, kwargs):
        assert method == "reload_weights"
        own = self.model.state_dict()
        for name, tensor in kwargs["weights_iterator"]:
            own[name].copy_(tensor)
        self.prefix_cache_is_stale = True

    def reset_prefix_cache(self):
        self.prefix_cache_is_stale = False

    def sleep(self, level):
        self.slept.append(level)

    def wake_up(self):
        self.slept.append(0)


class LLM:
    def __init__(
        self,
        model,
        *,
        skip_tokenizer_init,
        load_format,
        dtype,
        tensor_parallel_size,
        distributed_executor_backend,
        max_model_len,
        max_num_seqs,
        kv_cache_memory_bytes,
        enforce_eager,
        enable_chunked_prefill,
        enable_sleep_mode,
        logprobs_mode,
        disable_log_stats,
    ):
        assert load_format == "dummy"
        assert skip_tokenizer_init
        assert distributed_executor_backend == "external_launcher"
        self.llm_engine = Engine(model, logprobs_mode, max_model_len)


def package():
    made = types.ModuleType("vllm")
    made.LLM, made.SamplingParams = LLM, SamplingParams
    made.sampling_params = sys.modules[__name__]
    return made
