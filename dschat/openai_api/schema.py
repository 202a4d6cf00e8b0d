"""Declares the request bodies of OpenAI's interface that the server takes, and checks them."""

import json
import secrets
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, BaseModel, Field, WrapValidator, model_validator

from dschat.config import UserError
from dschat.config.data import template_variables
from dschat.data.sources.turns import BEGINS, Turn, begun, read_content, storable
from dschat.inference.protocol import SamplingParams

# Fields that change no answer, and values of others that ask for nothing, as null does.
_HARMLESS = (
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "parallel_tool_calls", "prediction", "request_id", "name"),
)
_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "annotations": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}

# Clients that cut text within an emoji send half of it: as data sets are read, it becomes a "?".
Text = Annotated[str, AfterValidator(storable)]
Stops = Union[None, str, Annotated[list[str], Field(max_length=16)]]


class StreamOptions(BaseModel):
    """What a stream contains besides text."""

    include_usage: bool = False


class Known(BaseModel):
    """Refuses fields that may change the answer and are not declared; leaves out nulls."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name, value in given.items():
            known = name in cls.model_fields or name in _HARMLESS
            if not known and value not in _ASKS_NOTHING.get(name, ()):
                raise ValueError(f"{name:.60} {value!r:.60} is not supported")
        return given


class GenerationRequest(Known):
    """What both kinds of requests have. Fields after ``response_format`` are not OpenAI's."""

    model: Text | None = None
    n: int = Field(1, ge=1, le=128)
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stops = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = {}
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    response_format: dict[str, Any] | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    allowed_token_ids: list[int] | None = Field(None, min_length=1)
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] = Field([], max_length=64)
    ignore_eos: bool = False

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    @property
    def has_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """Raises ``UserError`` for a value that cannot be sampled with."""
        seed = secrets.randbits(62) if self.seed is None else self.seed
        return SamplingParams(
            max_new_tokens=max(1, max_new_tokens),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),  # -1, elsewhere: off
            min_p=self.min_p or 0.0,
            seed=seed,
            n=self.n,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_new_tokens=min(self.min_tokens or 0, max_new_tokens),
        )


class Message(Known):
    """One turn of a conversation."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


def turns_of(messages: list[Message]) -> list[Turn]:
    """The conversation as training reads one.

    Raises:
        UserError: it could not be trained either.
    """
    turns: list[Turn] = []
    for i, message in enumerate(messages):
        read = read_content([message.model_dump(exclude_none=True)])
        if not isinstance(read, list):
            raise UserError(f"messages.{i}: {read}")
        turns += read
    return turns


# Each earlier answer is rendered as a turn of its own, so the work grows with the square.
Conversation = Annotated[list[Message], Field(min_length=1, max_length=256)]


class Function(BaseModel, extra="allow"):
    """A function that the model may call; JSON schema of its arguments."""

    name: Text = Field(min_length=1)
    parameters: dict[str, Any] = {}


class Tool(BaseModel):
    """A tool: a function."""

    type: Literal["function"]
    function: Function


def _as_it_came(tool: Any, check: Callable[[Any], Tool]) -> Any:
    """A tool for the chat template: its keys keep their order, as in training."""
    check(tool)
    return json.loads(storable(json.dumps(tool, ensure_ascii=False)))


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: Conversation
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Annotated[Tool, WrapValidator(_as_it_came)]] = Field([], max_length=128)
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(template_variables)] = {}
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _continues_or_begins(self) -> "ChatRequest":
        if self.continue_final_message == self.add_generation_prompt:
            raise ValueError("continue_final_message goes with add_generation_prompt false alone")
        return self

    @property
    def turns(self) -> list[Turn]:
        """The conversation; raises ``UserError`` where it could not be trained or continued."""
        turns = turns_of(self.messages)
        if self.continue_final_message and BEGINS not in (turns := begun(turns))[-1]:
            raise UserError("continue_final_message: the last message is no assistant's text")
        return turns

    @property
    def inputs(self) -> dict[str, Any]:
        """What the chat template gets beside the conversation."""
        tools = self.tools if self.tool_choice == "auto" else []
        return {"tools": tools or None, **self.chat_template_kwargs}

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def echo(self) -> bool:
        return False

    @property
    def num_top(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else 0


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``: text, or token ids."""

    prompt: Union[Text, list[int], list[Text], list[list[int]]]
    max_tokens: int | None = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _draws_or_echoes(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def num_top(self) -> int:
        return self.logprobs or 0

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]


Body = ChatRequest | CompletionRequest
