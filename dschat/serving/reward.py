"""Scores answers with a reward model of step 2, as it was trained: by its own tokenizer."""

import torch

import dschat.distributed as dist
from dschat.builtin.tiny_model import resolve_model
from dschat.chat.load import resolve_dtype
from dschat.config import UserError
from dschat.data.segments import encode_examples
from dschat.data.sources.adapters import Content, Example
from dschat.models.fit import check_fit
from dschat.models.load import load_score_backbone, not_a_reward_model
from dschat.models.model_kind import load_config, reward_form
from dschat.models.packing import pack
from dschat.models.row_length import num_positions
from dschat.models.score_model import ScoreModel
from dschat.models.tokenizer import load_tokenizer
from dschat.models.vocabulary import num_ids

_FLAG = "--reward_model"


class RewardModel:
    """The reward model at ``path``; see `ServeConfig`.

    Raises:
        UserError: not a reward model with a tokenizer.
    """

    def __init__(self, path: str, dtype: str, trust_remote_code: bool = False) -> None:
        name = resolve_model(path)
        config = load_config(name, _FLAG, trust_remote_code)
        if reward_form(config, name, _FLAG) == "base":
            raise not_a_reward_model(name, _FLAG, config)
        check_fit(config, name, _FLAG, "score")
        self._tokenizer = load_tokenizer(name, _FLAG, trust_remote_code)
        self._positions = num_positions(config)
        pad_id = config.pad_token_id
        model = load_score_backbone(
            name,
            _FLAG,
            resolve_dtype(dtype),
            from_base=False,
            pad_token_id=self._tokenizer.pad_token_id if pad_id is None else pad_id,
            num_tokens=num_ids(self._tokenizer),
            trust_remote_code=trust_remote_code,
        )
        self._model = ScoreModel(model.to(dist.device()).eval())
        self._model.check(dist.device())

    @torch.no_grad()
    def score(self, messages: list[dict[str, str]], answers: list[str]) -> list[float]:
        """The score of each answer to a conversation, at its end.

        Raises:
            UserError: the chat template refuses the messages, or they are longer than the model.
        """
        turns: list[Content] = [[{"role": "assistant", "content": text}] for text in answers]
        example = Example(messages, others=turns)
        (encoded,) = encode_examples(self._tokenizer, [example], ("others",))
        if encoded.problem:
            raise UserError(encoded.problem)
        rows = [encoded.prompt_ids + answer for answer in encoded.answers]
        if self._positions is not None and (longest := max(map(len, rows))) > self._positions:
            raise UserError(
                f"{longest} tokens, and the reward model has {self._positions} positions"
            )
        packed = pack(rows, [[len(row) - 1] for row in rows])
        return self._model(packed.to(dist.device())).tolist()
