"""Trainers in the manner of TRL: a model, data, and what scores, in one call.

    GRPOTrainer(model="output/step1_sft", data="questions.jsonl", reward_fns=[correct]).train()

Each runs a whole step, as its command does, with the same results: data, checkpoints, resume,
evaluation and saved models. Settings are the flags of the step, as keywords or as ``args``.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from inspect import Parameter, Signature, signature
from pkgutil import resolve_name
from typing import Any, ClassVar

from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SFTConfig, UserError
from dschat.config.errors import require
from dschat.config.fields import changed
from dschat.config.renamed import require_known

# Flag -> what constructors call it.
_PYTHON = {
    "data_path": "data",
    "eval_data_path": "eval_dataset",
    "callback": "callbacks",
    "reward_fn": "reward_fns",
    "reward_model_name_or_path": "reward_model",
}


class _Trainer:
    """A step with its settings.

    Args:
        model: a folder, a hub name, or a loaded model of transformers, which is written to the
            output folder to start from there, and has the trained weights after `train`.
        data, train_dataset: rows (a list of dicts, a `Dataset` or a DataFrame) or names as
            ``--data_path`` takes them, or a list of such; None: as ``args`` say. All rows are for
            this step, those of names as ``data_split`` says.
        args: the step's config, of which keywords override fields.
        eval_dataset: held-out data, likewise.
        processing_class, tokenizer: of a loaded model; None: that of where it was loaded from.
        callbacks: classes or objects with hooks; see `dschat.runtime.start`.
        flags: fields of the config.

    Attributes:
        config: the settings of the run.

    Raises:
        UserError: a setting that does not exist, or that is wrong.
    """

    config_class: type[CommonConfig]
    model_flag: ClassVar[str] = "model_name_or_path"
    runs: ClassVar[str]  # the function, imported when it is called
    defaults: ClassVar[dict[str, Any]] = {}
    share: ClassVar[str]  # the data_split that gives all rows to this step
    _objects: tuple[Any, ...] = ()

    def __init_subclass__(cls) -> None:
        """Signature and docstring, which ``help`` and notebooks show, have the settings too."""
        made = [signature(getattr(c, "__init__")) for c in cls.__mro__[-2::-1]]  # noqa: B009
        own = {n: p for of in made for n, p in of.parameters.items() if n not in ("self", "flags")}
        config, kind = cls.config_class(**cls.defaults), Parameter.KEYWORD_ONLY
        cls.__doc__ = f"{cls.__doc__ or ''}\n\n    Settings:"
        settings = [f for f in fields(config) if f.name not in (*own, cls.model_flag)]
        for f in sorted(settings, key=lambda f: not f.metadata["short"]):  # the most used first
            own[f.name] = Parameter(
                f.name, kind, default=getattr(config, f.name), annotation=f.type
            )
            cls.__doc__ = f"{cls.__doc__}\n        {f.name}: {f.metadata['help']}"
        setattr(cls, "__signature__", Signature(sorted(own.values(), key=lambda p: p.kind)))  # noqa: B010

    def __init__(
        self,
        model: Any,
        data: Any = None,
        args: Any = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        tokenizer: Any = None,
        callbacks: Sequence[Any] = (),
        **flags: Any,
    ) -> None:
        self._callbacks = callbacks
        called = _PYTHON | {self.model_flag: "model"}
        self._names = {f.name: called.get(f.name, f.name) for f in fields(self.config_class)}
        known = {*self._names, *signature(type(self)).parameters}
        require_known(flags, known, type(self).__name__, "setting", self._names)
        rows, defaults = _one_of(data=data, train_dataset=train_dataset), self.defaults
        if rows is not None and not _are_names(rows):
            defaults = defaults | {"data_split": self.share}
        for flag, given in (("data_path", rows), ("eval_data_path", eval_dataset)):
            if given is not None:
                from dschat.data.sources.tables import data_names

                flags[flag] = data_names(given, _PYTHON[flag])
        tokenizer = _one_of(processing_class=processing_class, tokenizer=tokenizer)
        with self._in_python():
            config = type(self).config_class.from_namespace({} if args is None else args)
            values = defaults | changed(config) | flags
            self._loaded: Any = None
            if isinstance(model, (str, os.PathLike)):
                require(tokenizer is None, "processing_class is for a loaded model; leave it out")
                values[self.model_flag] = str(model)
            else:
                from dschat.runtime.loaded_model import LoadedModel

                self._loaded = LoadedModel(model, tokenizer, self.config_class(**values))
                values[self.model_flag] = self._loaded.folder
            self.config = self.config_class(**values)
            self.config.validate()

    @contextmanager
    def _in_python(self) -> Iterator[None]:
        """Errors name arguments of Python in place of flags."""
        try:
            yield
        except UserError as error:
            text = re.sub(r"--(\w+)", lambda found: self._names.get(found[1], found[0]), str(error))
            error.args = (text,)
            raise

    def train(self) -> Any:
        """Collective. Train and save; returns DeepSpeed's engine, or in step 3 the
        `DeepSpeedPPOTrainer`.

        Raises:
            UserError: before weights load, for a mistake in settings, names or data.
            TrainingStopped: after a checkpoint, where the run was asked to stop.
        """
        with self._in_python():
            if self._loaded:
                self._loaded.write(self.config)
            run = resolve_name(self.runs)
            result = run(self.config, *self._objects, self._callbacks)
        if self._loaded:
            self._loaded.fill(self.config)
        return result


def _are_names(data: Any) -> bool:
    items = data if isinstance(data, (list, tuple)) else [data]
    return all(isinstance(item, (str, os.PathLike)) for item in items)


def _one_of(**arguments: Any) -> Any:
    """The value of the one of these arguments that is given; None where none is."""
    given = {name: value for name, value in arguments.items() if value is not None}
    require(len(given) < 2, f"{' and '.join(given)} mean the same; leave one out")
    return next(iter(given.values()), None)


class SFTTrainer(_Trainer):
    """Step 1: fine-tunes ``model`` on demonstrations."""

    config_class = SFTConfig
    share = "1,0,0"
    runs = "dschat.supervised.run:train_sft"


class RewardTrainer(_Trainer):
    """Step 2: trains a reward model, from the language model ``model``, on answers that were
    compared.
    """

    config_class = RewardConfig
    share = "0,1,0"
    runs = "dschat.supervised.run:train_on_preferences"


class DPOTrainer(RewardTrainer):
    """Step 2 with a policy loss (``loss``: dpo, ipo or kto): trains ``model`` itself."""

    defaults = {"loss": "dpo"}


class PPOTrainer(_Trainer):
    """Step 3 with a critic (``advantage_estimator`` gae).

    Args:
        reward_model: a folder or a hub name; a critic starts from it.
        reward_fns, reward_funcs: two names for a function, or a list of them, in addition or alone:
            a critic then starts from the actor.
        environment, tools: a class or function, and functions; see `dschat.environments`.
        agent: a function ``run(client, prompt, **columns)``, in their place.
    """

    config_class = RLHFConfig
    share = "0,0,1"
    runs = "dschat.rlhf.run:train"
    model_flag = "actor_model_name_or_path"

    def __init__(
        self,
        model: Any,
        data: Any = None,
        args: Any = None,
        *,
        reward_model: Any = None,
        reward_fns: Any = None,
        reward_funcs: Any = None,
        environment: Any = None,
        tools: Sequence[Any] = (),
        agent: Any = None,
        **flags: Any,
    ) -> None:
        functions = _one_of(reward_fns=reward_fns, reward_funcs=reward_funcs) or ()
        self._objects = functions, environment, tools, agent
        scores = bool(functions) or environment is not None or agent is not None
        if scores or tools:

            class Config(RLHFConfig):
                scores_with_objects = scores
                has_python_episodes = bool(environment or tools or agent)

            self.config_class = Config
        if reward_model is not None:
            kind = type(reward_model).__name__
            require(isinstance(reward_model, (str, os.PathLike)), f"reward_model is a {kind}")
            flags["reward_model_name_or_path"] = str(reward_model)
        super().__init__(model, data, args, **flags)


class GRPOTrainer(PPOTrainer):
    """Step 3 with several answers per prompt, compared with each other, and no critic."""

    defaults = {"advantage_estimator": "grpo", "num_samples_per_prompt": 8}
