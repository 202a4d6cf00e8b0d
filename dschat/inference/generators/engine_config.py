"""Declares the sizes and limits of an inference engine."""

from dataclasses import dataclass

import torch

import dschat.distributed as dist
from dschat.config import RLHFConfig, UserError

# Tokens per page where a page is not a whole sequence. On average, half a page per sequence is
# empty: 2.5% of the bytes that sequences of 1,024 tokens use, 5% with pages of 64.
SMALL_PAGE = 32


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and limits of an `InferenceEngine`, under the names that its errors use.

    Attributes:
        stop_ids: tokens that end an answer (see ``SamplingParams.ignore_eos``).
        num_tokens: size of the tokenizer; ids from it on, for which a head may have rows, are
            never drawn.
        max_num_seqs: sequences that decode together; equal answers to a prompt count once.
        max_seq_len: longest prompt + answer; default and maximum: the model's positions.
        length_flags: what an error calls ``max_seq_len``.
        max_num_batched_tokens: tokens per step, longer prompts are computed in chunks; default:
            8192 on CUDA, 2048 on a CPU.
        kv_cache_gib: size of the KV cache; default: enough for ``max_num_seqs`` sequences of
            ``max_seq_len``, but at most half of the memory that is free when it is first allocated.
        page_size: tokens per page; default: 32 where decode steps are captured, else
            ``max_seq_len``, one page per sequence, or 32 if so many do not fit.
        cuda_graphs: capture decode steps and replay them. True: an error where that is not
            possible; None: on CUDA, with a warning if a capture fails.
        keeps_experts: answers come with the experts that each of their tokens chose.

    Raises:
        UserError: a size below 1, by its name.
    """

    stop_ids: tuple[int, ...] = ()
    num_tokens: int | None = None
    max_num_seqs: int = 64
    max_seq_len: int | None = None
    length_flags: str = "max_seq_len"
    max_num_batched_tokens: int | None = None
    kv_cache_gib: float | None = None
    page_size: int | None = None
    cuda_graphs: bool | None = None
    keeps_experts: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_seq_len", "max_num_batched_tokens", "page_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} {value} must be at least 1")

    @classmethod
    def of_rollout(
        cls, args: RLHFConfig, stop_ids: tuple[int, ...] = (), num_tokens: int | None = None
    ) -> "EngineConfig":
        """The sizes of step 3's rollouts and evaluations."""
        samples = args.samples_under_way * args.inference_tp_size
        return cls(
            stop_ids=stop_ids,
            num_tokens=num_tokens,
            max_num_seqs=min(args.max_num_seqs, max(samples, args.eval_batch_size)),
            max_seq_len=args.longest_row,
            length_flags="--max_prompt_seq_len + --max_answer_seq_len",
            max_num_batched_tokens=args.max_num_batched_tokens,
            kv_cache_gib=args.kv_cache_gib,
            # A turn of an episode finds the pages of those before it.
            page_size=args.kv_page_size or (SMALL_PAGE if args.has_episodes else None),
            cuda_graphs=args.cuda_graphs,
            keeps_experts=args.moe_routing_replay,
        )

    def batched_tokens(self, on_gpu: bool) -> int:
        """Tokens per step."""
        return self.max_num_batched_tokens or (8192 if on_gpu else 2048)

    def seq_len(self, max_positions: int | None) -> int:
        """Longest prompt + answer of a model with ``max_positions``; None: any length."""
        bounds = (self.max_seq_len or max_positions or 2048, max_positions)
        return min(bound for bound in bounds if bound is not None)

    def captures(self, on_gpu: bool) -> bool:
        """Whether decode steps are captured, as far as is known before a capture."""
        return self.cuda_graphs is not False and on_gpu

    def tokens_per_page(
        self, seq_len: int, is_captured: bool, token_bytes: int, free_bytes: int
    ) -> int:
        """``page_size``, or its default, within a sequence of ``seq_len``."""
        if self.page_size is not None:
            return min(self.page_size, seq_len)
        all_bytes = self.max_num_seqs * seq_len * token_bytes
        if not is_captured and all_bytes <= self.cache_bytes(free_bytes):
            return seq_len
        return min(SMALL_PAGE, seq_len)

    def num_pages(self, seq_len: int, page_size: int, page_bytes: int, free_bytes: int) -> int:
        """Pages of the KV cache, as many as fit; 0 if none does."""
        wanted = self.max_num_seqs * -(-seq_len // page_size)
        return min(wanted, self.cache_bytes(free_bytes) // page_bytes)

    def cache_bytes(self, free_bytes: int) -> int:
        """Bytes that the KV cache may take of ``free_bytes``."""
        return free_bytes // 2 if self.kv_cache_gib is None else int(self.kv_cache_gib * 2**30)


def require_current(device: torch.device) -> None:
    """Raise ``UserError`` for a GPU but the current one, on which streams and graphs are."""
    if device.type != "cuda":  # else a CUDA build of torch would look for a GPU
        return
    if device.index not in (None, torch.cuda.current_device() if torch.version.cuda else 0):
        raise UserError(
            f"device {device} is not the current one; call torch.cuda.set_device({device.index}) "
            f"first, or start the process with CUDA_VISIBLE_DEVICES={device.index}"
        )


def device_named(name: str) -> torch.device:
    """Raises ``UserError`` where torch does not know the device, or the machine has none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name} is unknown; use cpu or cuda") from None
    if device.type == "cuda" and not dist.has_gpu():
        raise UserError(f"device {name}: this machine has no CUDA device; use cpu")
    return device
