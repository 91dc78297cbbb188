"""Finding the reward function: the user's, from a file, or a built-in one, by data source."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from podium.utils.errors import UserError
from podium.utils.python_file import import_file

RewardFn = Callable[..., Any]
"""``fn(data_source=, solution_str=, ground_truth=, extra_info=, **kwargs)``: a number, a dict with ``score``, or an
awaitable of either."""

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")


@dataclass(frozen=True)
class RewardSource:
    """Where a reward function is: it travels like this, since functions of files that are no package do not pickle."""

    path: str | None = None
    """Python file; without one it is a built-in reward."""
    name: str = "compute_score"
    """Its name there; without a file, of a built-in reward, and by default `default_compute_score`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Added to every call."""
    arguments: tuple[str, ...] = ARGUMENTS
    """What every call passes by name."""

    def load(self) -> RewardFn:
        """Imports it.

        Raises:
            UserError: no such file, an error while it is imported (with its line), no such function (the nearest is
                named), or one that cannot be called with `arguments` and `kwargs`.
        """
        if self.path is None:
            fn = self._built_in()
            self._check_signature(fn, "Podium")
            return partial(fn, **self.kwargs)
        file = Path(self.path).expanduser().resolve()
        fn = _find(import_file(file, "custom_reward_function.path"), self.name, file)
        self._check_signature(fn, str(file))
        return partial(fn, **self.kwargs)

    def __str__(self) -> str:
        if self.path is not None:
            return f"{self.name} in {self.path}"
        return f"built in as {self.name}" if self.name != RewardSource.name else "built in for the data_source"

    def _built_in(self) -> RewardFn:
        from podium.workers.reward import builtin

        return default_compute_score if self.name == RewardSource.name else builtin.find(self.name)

    def _check_signature(self, fn: RewardFn, file: str) -> None:
        clash = [key for key in self.kwargs if key in self.arguments]
        if clash:
            raise UserError(f"custom_reward_function.reward_kwargs has '{clash[0]}', which every call already passes")
        try:
            signature = inspect.signature(fn)
        except ValueError:  # some callables written in C have none; the trial on a real row will tell
            return
        try:
            signature.bind(**dict.fromkeys(self.arguments), **self.kwargs)
        except TypeError as error:
            if inspect.isclass(fn):
                raise UserError(
                    f"custom_reward_function.name={self.name}: in {file} that is a class; name an instance of it, made "
                    f"there ({self.name.lower()} = {self.name}())"
                ) from None
            extra = f" and reward_kwargs {', '.join(self.kwargs)}" if self.kwargs else ""
            raise UserError(
                f"custom_reward_function: {self.name}{signature} in {file} cannot be called with the keywords "
                f"{', '.join(self.arguments)}{extra}: {error}{self._other_manager(signature)}"
            ) from None

    def _other_manager(self, signature: inspect.Signature) -> str:
        """What to do about a function that takes what the other kind of manager passes."""
        batch = self.arguments == BATCH_ARGUMENTS
        if not set(ARGUMENTS if batch else BATCH_ARGUMENTS) & set(signature.parameters):
            return ""
        if batch:
            return "; it takes one response a call: leave out reward_model.reward_manager=batch"
        return "; it takes all responses in a call: set reward_model.reward_manager=batch"


def _find(module: ModuleType, name: str, file: Path) -> RewardFn:
    fn = getattr(module, name, None)
    if callable(fn):
        return fn
    if fn is not None:
        raise UserError(f"custom_reward_function.name={name}: in {file} that is {type(fn).__name__}, not a function")
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(name, functions, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(functions) or 'no functions'}"
    raise UserError(f"custom_reward_function.name={name}: {file} has no such function; {hint}")


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> Any:
    """Scores by the data source's built-in reward (`podium.workers.reward.builtin`).

    Raises:
        UserError: there is none for `data_source`, or it refuses the row.
    """
    from podium.workers.reward import builtin

    return builtin.find(builtin.name_for(data_source))(
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
    )
