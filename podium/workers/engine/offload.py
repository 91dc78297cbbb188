"""Parts of an engine that rest in host memory while nothing computes with them."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch

from podium.utils.device import is_cuda
from podium.utils.freed_memory import FreedMemory

Part = Literal["params", "optimizer", "grads"]
PARTS: tuple[Part, ...] = ("params", "optimizer", "grads")
"""Parameters; optimizer state, and master weights where they are not the parameters; gradients between steps."""

_KEYS: dict[str, Part] = {"param_offload": "params", "optimizer_offload": "optimizer", "grad_offload": "grads"}


class Parked:
    """The content of tensors, put away on the host.

    The tensors, and all views of them, stay the objects they are: their storages are emptied, and `restore` fills them
    again. On a CPU this frees one allocation for another.

    Args:
        keep: False where the content is not needed any more; after `restore` it is zero.
    """

    def __init__(self, tensors: Collection[torch.Tensor], keep: bool = True):
        storages = {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        self._copies = [(storage, _copy(storage)) for storage in storages.values()] if keep else []
        self._freed = FreedMemory(tensors)

    def restore(self) -> None:
        """Brings the content back."""
        self._freed.restore()
        for storage, copy in self._copies:
            _bytes_of(storage).copy_(copy)
        self._copies = []


def _copy(storage: torch.UntypedStorage) -> torch.Tensor:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=is_cuda())
    return copy.copy_(_bytes_of(storage))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Offloadable(ABC):
    """What has parts that can rest in host memory; `rest` says which do, and each `phase` what it needs."""

    def __init__(self) -> None:
        self._parked: dict[Part, Parked] = {}

    @abstractmethod
    def memory(self, part: Part) -> list[torch.Tensor]:
        """Tensors whose storages are what this rank now holds of a part; no storage belongs to two parts."""

    def rest(self, config: Any) -> None:
        """Puts the parts on the host that `config` names, where they are but for the phases that need them.

        Args:
            config: has any of ``param_offload``, ``optimizer_offload`` and ``grad_offload``.
        """
        self.to("host", [part for key, part in _KEYS.items() if getattr(config, key, False)])

    def to(self, where: Literal["host", "device"], parts: Collection[Part] = PARTS) -> None:
        """Moves parts; does nothing with those that are there.

        Gradients are not moved: they are freed, and come back as zeros.
        """
        if where == "device":
            for part in parts:
                if part in self._parked:
                    self._parked.pop(part).restore()
            return
        for part in parts:
            if part not in self._parked:
                self._parked[part] = Parked(self.memory(part), keep=part != "grads")
        if parts and is_cuda():
            torch.cuda.empty_cache()  # for the other processes on the device

    @contextmanager
    def phase(self, *parts: Part) -> Iterator[None]:
        """While open, these parts are on the device."""
        away = [part for part in parts if part in self._parked]
        self.to("device", away)
        try:
            yield
        finally:
            self.to("host", away)


_S = TypeVar("_S", bound=Offloadable)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method = Callable[Concatenate[_S, _P], _R]


def needs(*parts: Part) -> Callable[[_Method[_S, _P, _R]], _Method[_S, _P, _R]]:
    """Decorator of a method that is a phase."""

    def decorate(method: _Method[_S, _P, _R]) -> _Method[_S, _P, _R]:
        @functools.wraps(method)
        def run(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self.phase(*parts):
                return method(self, *args, **kwargs)

        return run

    return decorate
