"""Named functions that a configuration chooses from, and the refusal of a name that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from enum import Enum, StrEnum
from typing import Any, TypeVar

from podium.utils.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not among ``known``: it gives the nearest one and then all of them."""
    choices = sorted(known)
    nearest = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.0)
    hint = f" did you mean {nearest[0]!r}?" if nearest else ""
    return UserError(f"unknown {kind} {name!r};{hint} known: {', '.join(choices)}")


class Registry:
    """Maps names to functions of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, Callable[..., Any]] = {}

    def register(self, name: str | Enum) -> Callable[[F], F]:
        """Decorator that adds a function under ``name``; a second function under a taken name is a ``UserError``."""
        key = _key(name)

        def decorate(function: F) -> F:
            taken = self._functions.get(key)
            # A module that is reloaded, or run as __main__, registers the same function again.
            if taken is not None and taken.__qualname__ != function.__qualname__:
                raise UserError(f"{self.kind} {key!r} is already registered by {taken.__module__}.{taken.__qualname__}")
            self._functions[key] = function
            return function

        return decorate

    def get(self, name: str | Enum) -> Callable[..., Any]:
        """The function registered under ``name``; a ``UserError`` with the nearest name if there is none."""
        key = _key(name)
        if key not in self._functions:
            raise unknown_name(self.kind, key, self._functions)
        return self._functions[key]

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._functions)


def _key(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


class AdvantageEstimator(StrEnum):
    """The names of ``algorithm.adv_estimator`` that Podium ships; ``register_adv_est`` takes any other string too."""

    GAE = "gae"
    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    OPO = "opo"
    GPG = "gpg"
    GRPO_PASSK = "grpo_passk"
    GDPO = "gdpo"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"


ADV_ESTIMATOR_REGISTRY = Registry("algorithm.adv_estimator")


def register_adv_est(name: str | Enum) -> Callable[[F], F]:
    """Decorator that makes an estimator available as ``algorithm.adv_estimator=name``."""
    return ADV_ESTIMATOR_REGISTRY.register(name)


def get_adv_estimator_fn(name: str | Enum) -> Callable[..., Any]:
    """The estimator called ``name``; a ``UserError`` with the nearest name if there is none."""
    return ADV_ESTIMATOR_REGISTRY.get(name)
