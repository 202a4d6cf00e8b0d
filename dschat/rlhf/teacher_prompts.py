"""The teacher's own prompts: ``--teacher_prompt`` puts what the actor does not know, such as the
reference answer or an environment's error, in front of its answers.

With a teacher model that model reads them. Without one the actor is the teacher, as it was before
the update: SDFT (Shenfeld et al. 2026, arXiv 2601.19897), SDPO (Huebotter et al. 2026, arXiv
2601.20802).
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

import dschat.distributed as dist
from dschat.config import RLHFConfig, UserError
from dschat.config.errors import require
from dschat.config.reward import REFERENCE
from dschat.data.segments import prompt_text_ids
from dschat.models.training_engine import evaluating
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import Experience
from dschat.rlhf.forwards import fill_in_candidates, fill_in_teacher
from dschat.user_code.calls import Fault, called, load


@cache
def teacher_prompt(spec: str) -> Callable[..., Any]:
    """The function of ``--teacher_prompt``.

    Raises:
        UserError: it cannot be found, or is no function.
    """
    function = load(spec, f"--teacher_prompt {spec}")
    require(callable(function), f"--teacher_prompt {spec} is no function")
    return function


@torch.no_grad()
def fill_in_taught(engine: DeepSpeedRLHFEngine, e: Experience, args: RLHFConfig) -> float:
    """Collective. Fill in the teacher's log-probs, or its candidates, after its own prompts.
    Returns the number of this rank's answers whose teacher has a prompt of its own.

    Raises:
        UserError: on all ranks, where the function failed on one of them.
    """
    prompts: dict[int, list[int]] = {}
    problem = ""
    try:
        prompts = _prompts(engine, e, args.teacher_prompt)
    except (Fault, UserError) as error:
        problem = f"--teacher_prompt {args.teacher_prompt} {error}"
    for line in filter(None, dist.gather_objects(problem)):
        raise UserError(line)
    view = _with_prompts(e, prompts)
    with evaluating(engine.actor):
        if args.distill_top_k:
            fill_in_candidates(engine, e, view, args)
        else:
            model = engine.actor if engine.teacher is None else engine.teacher
            fill_in_teacher(engine, model, view, args)
            e.teacher_logprobs = view.teacher_logprobs
    return float(len(prompts))


def _prompts(engine: DeepSpeedRLHFEngine, e: Experience, spec: str) -> dict[int, list[int]]:
    """Row -> ids of the teacher's prompt, where the function returns one that fits the model."""
    function, tokenizer = teacher_prompt(spec), engine.tokenizer
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    config = engine.checkpoints.actor.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or torch.inf
    prompts = {}
    for row in range(e.num_sequences):
        own, answer = e.input_ids[row, : e.lengths[row]].split(
            [int(e.prompt_lengths[row]), int(e.lengths[row] - e.prompt_lengths[row])]
        )
        known = dict(e.columns[row]) if e.columns else {}
        texts = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (own, answer))
        if column := next((name for name in REFERENCE if name in known), None):
            known["reference"] = known[column]  # as reward functions have it
        known["prompt"], known["completion"] = texts
        known["score"] = float(e.scores[row])
        if e.sources and e.sources[row] is not None:
            known["prompt"] = e.sources[row]
        if missing := [name for name in needed if name not in known]:
            columns = ", ".join(sorted(known))
            raise UserError(f"takes {missing[0]}, which the data lacks (it has: {columns})")
        names = known if takes_all else {p.name for p in parameters} & known.keys()
        found = called(function, **{name: known[name] for name in names})
        if found is None:
            continue
        require(found and isinstance(found, (str, list)), "must return text, messages or None")
        inputs = e.inputs[row] if e.inputs and isinstance(found, list) else {}
        ids = prompt_text_ids(tokenizer, found, **inputs)
        if len(ids) + len(answer) <= longest:
            prompts[row] = ids
    return prompts


def _with_prompts(e: Experience, prompts: dict[int, list[int]]) -> Experience:
    """``e`` with these rows' prompts in place of their own."""
    sequences = [ids[:length] for ids, length in zip(e.input_ids, e.lengths, strict=True)]
    starts = e.prompt_lengths.clone()
    for row, ids in prompts.items():
        sequences[row] = torch.cat([torch.tensor(ids), sequences[row][starts[row] :]])
        starts[row] = len(ids)
    if not sequences:
        return e
    padded = pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(ids) for ids in sequences])
    return replace(e, input_ids=padded, lengths=lengths, prompt_lengths=starts, experts=None)
