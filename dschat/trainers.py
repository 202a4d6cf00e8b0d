"""Trainers in the manner of TRL: a model, data, and what scores, in one call.

    GRPOTrainer(model="output/step1_sft", data="questions.jsonl", reward_fns=[correct]).train()

Each runs a whole step, as its command does, with the same results: data, checkpoints, resume,
evaluation and saved models. Settings are the flags of the step, as keywords or as ``args``.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar

from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SFTConfig, UserError, renamed
from dschat.config.fields import changed

# Flag -> what constructors call it.
_PYTHON = {
    "data_path": "data",
    "callback": "callbacks",
    "reward_fn": "reward_fns",
    "reward_model_name_or_path": "reward_model",
}


class _Trainer:
    """A step with its settings.

    Args:
        model: a folder or a hub name.
        data: data sets, as ``--data_path`` takes them: a file, folder or hub name, or a list;
            None: as ``args`` say.
        args: the step's config, of which keywords override fields.
        callbacks: classes or objects with hooks; see `dschat.runtime.start`.
        flags: fields of the config.

    Attributes:
        config: the settings of the run.

    Raises:
        UserError: a setting that does not exist, or that is wrong.
    """

    config_class: ClassVar[type[CommonConfig]]
    model_flag: ClassVar[str] = "model_name_or_path"
    runs: ClassVar[str]  # the function, imported when it is called
    defaults: ClassVar[dict[str, Any]] = {}
    _objects: tuple[Any, ...] = ()

    def __init_subclass__(cls) -> None:
        """Signature and docstring, which ``help`` and notebooks show, have the settings too."""
        made = [signature(getattr(c, "__init__")).parameters for c in cls.__mro__[-2::-1]]  # noqa: B009
        own = {
            n: p for of in made for n, p in of.items() if n != "self" and p.kind != p.VAR_KEYWORD
        }
        config, kind = cls.config_class(**cls.defaults), Parameter.KEYWORD_ONLY
        cls.__doc__ = f"{cls.__doc__}\n\n    Settings:"
        settings = [f for f in fields(config) if f.name not in (*own, cls.model_flag)]
        for f in sorted(settings, key=lambda f: not f.metadata["short"]):  # the most used first
            own[f.name] = Parameter(
                f.name, kind, default=getattr(config, f.name), annotation=f.type
            )
            cls.__doc__ = f"{cls.__doc__}\n        {f.name}: {f.metadata['help']}"
        setattr(cls, "__signature__", Signature(sorted(own.values(), key=lambda p: p.kind)))  # noqa: B010

    def __init__(
        self,
        model: str,
        data: str | Sequence[str] | None = None,
        args: Any = None,
        *,
        callbacks: Sequence[Any] = (),
        **flags: Any,
    ) -> None:
        self._callbacks = callbacks
        known = {f.name for f in fields(self.config_class)}
        called = _PYTHON | {self.model_flag: "model"}
        hints = {n: renamed.hint(n, known, python=called) for n in flags if n not in known}
        if hints:
            raise UserError(f"{type(self).__name__}: {renamed.unknown('setting', hints)}")
        config = None if args is None else self.config_class.from_namespace(args)
        given = {} if config is None else changed(config)
        values = self.defaults | given | flags | {self.model_flag: str(model)}
        if data is not None:
            values["data_path"] = [data] if isinstance(data, str) else [str(d) for d in data]
        self.config = self._made(values)
        self.config.validate()

    def _made(self, values: dict[str, Any]) -> Any:
        return self.config_class(**values)

    def train(self) -> Any:
        """Collective. Train and save; returns DeepSpeed's engine, or in step 3 the
        `DeepSpeedPPOTrainer`.

        Raises:
            UserError: before weights load, for a mistake in settings, names or data.
            TrainingStopped: after a checkpoint, where the run was asked to stop.
        """
        module, _, name = self.runs.partition(":")
        return getattr(import_module(module), name)(self.config, *self._objects, self._callbacks)


class SFTTrainer(_Trainer):
    """Step 1: fine-tunes ``model`` on demonstrations."""

    config_class = SFTConfig
    runs = "dschat.supervised.run:train_sft"


class RewardTrainer(_Trainer):
    """Step 2: trains a reward model, from the language model ``model``, on answers that were
    compared.
    """

    config_class = RewardConfig
    runs = "dschat.supervised.run:train_on_preferences"


class DPOTrainer(RewardTrainer):
    """Step 2 with a policy loss (``loss``: dpo, cdpo, ipo or kto): trains ``model`` itself."""

    defaults = {"loss": "dpo"}


class PPOTrainer(_Trainer):
    """Step 3 with a critic (``advantage_estimator`` gae).

    Args:
        reward_model: a folder or a hub name; a critic starts from it.
        reward_fns: functions in addition, or alone: a critic then starts from the actor.
        environment, tools: a class or function, and functions; see `dschat.environments`.
    """

    config_class = RLHFConfig
    runs = "dschat.rlhf.run:train"
    model_flag = "actor_model_name_or_path"

    def __init__(
        self,
        model: str,
        data: str | Sequence[str] | None = None,
        args: Any = None,
        *,
        reward_model: str | None = None,
        reward_fns: Sequence[Callable[..., Any] | Any] = (),
        environment: Any = None,
        tools: Sequence[Any] = (),
        **flags: Any,
    ) -> None:
        self._objects = reward_fns, environment, tools
        if reward_model is not None:
            flags["reward_model_name_or_path"] = str(reward_model)
        super().__init__(model, data, args, **flags)

    def _made(self, values: dict[str, Any]) -> Any:
        class Config(RLHFConfig):
            scores_with_objects = bool(len(self._objects[0]) or self._objects[1] is not None)

        return (Config if Config.scores_with_objects else RLHFConfig)(**values)


class GRPOTrainer(PPOTrainer):
    """Step 3 with several answers per prompt, compared with each other, and no critic."""

    defaults = {"advantage_estimator": "grpo", "num_samples_per_prompt": 8}
