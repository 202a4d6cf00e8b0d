"""Scores answers with a reward model of step 2, as it was trained: by its own tokenizer."""

from dschat.builtin.tiny_model import resolve_model
from dschat.chat.model import resolve_dtype
from dschat.config import UserError
from dschat.data.segments import encode_examples
from dschat.data.sources.adapters import Content, Example
from dschat.models.checkpoint import Checkpoint
from dschat.models.row_length import num_positions
from dschat.models.score_model import RewardModel
from dschat.models.vocabulary import num_ids


class ChatScorer:
    """The reward model at ``path``; see `ServeConfig`.

    Raises:
        UserError: not a reward model with a tokenizer.
    """

    def __init__(self, path: str, dtype: str, trust_remote_code: bool = False) -> None:
        checkpoint = Checkpoint(resolve_model(path), "--reward_model", trust_remote_code)
        checkpoint.require_reward_model()
        checkpoint.check("score")
        self._tokenizer = tokenizer = checkpoint.tokenizer()
        self._positions = num_positions(checkpoint.config)
        self._model = RewardModel(
            checkpoint, resolve_dtype(dtype), tokenizer.pad_token_id, num_ids(tokenizer)
        )

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
        return self._model.score(rows).tolist()
