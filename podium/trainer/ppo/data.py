"""The prompts of a run and their order, as the configuration asks for them."""

from pathlib import Path
from typing import Any

from podium.trainer.chat import chat_options
from podium.trainer.config.ppo import DataConfig
from podium.utils.dataset import EpochLoader, PromptDataset
from podium.utils.dataset_order import MixtureLoader, Sampler
from podium.utils.errors import UserError
from podium.utils.python_file import import_file


def prompt_dataset(data: DataConfig, tokenizer: Any, which: str) -> PromptDataset:
    """The data set of ``train_files`` or ``val_files``.

    Raises:
        UserError: bad files, or a ``custom_cls`` that is no `PromptDataset`.
    """
    cls: type[PromptDataset] = PromptDataset
    if data.custom_cls.path is not None:
        cls = _class_of(data.custom_cls, "data.custom_cls", PromptDataset)
    return cls(
        getattr(data, which),
        tokenizer,
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        workers=data.filter_overlong_prompts_workers,
        chat=chat_options(data),
        column_names=data.column_names,
        key=f"data.{which}",
    )


def train_order(data: DataConfig, dataset: PromptDataset) -> Sampler:
    """In which order the training prompts come.

    Raises:
        UserError: weights that do not fit the files, or a ``sampler`` that is none.
    """
    if data.sampler.path is not None:
        cls: Any = _class_of(data.sampler, "data.sampler", Sampler)
        sampler: Sampler = cls(dataset, data.train_batch_size, data.seed)
        return sampler
    if data.train_weights is not None:
        return MixtureLoader(dataset.by_entry(), data.train_weights, data.train_batch_size, data.seed, data.shuffle)
    return EpochLoader(len(dataset), data.train_batch_size, data.seed, data.shuffle)


def _class_of(plugin: Any, key: str, base: type) -> Any:
    file = Path(plugin.path).expanduser().resolve()
    found = getattr(import_file(file, f"{key}.path"), plugin.name or "", None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{key}.name={plugin.name}: {file} has no class of that name that extends {base.__name__}")
    return found
