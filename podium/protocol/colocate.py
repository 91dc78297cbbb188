"""Several roles in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.protocol.group import ClassWithInitArgs
from podium.utils.errors import UserError


class ColocatedClassWithInitArgs(ClassWithInitArgs):
    """Roles that are constructed in one process, in order."""

    def __init__(self, roles: Mapping[str, ClassWithInitArgs]) -> None:
        super().__init__(object)
        self._roles = dict(roles)

    @property
    def roles(self) -> dict[str, ClassWithInitArgs]:
        """The roles by name."""
        return self._roles

    def __call__(self) -> Any:
        raise TypeError("a colocated class is constructed role by role")


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ColocatedClassWithInitArgs:
    """One class whose process holds an instance of every role: ``{"actor": ClassWithInitArgs(...), "critic": ...}``.

    Raises:
        UserError: no roles, or a value that is not a ClassWithInitArgs.
    """
    for role, spec in class_dict.items():
        if not isinstance(spec, ClassWithInitArgs) or spec.roles is not None:
            raise UserError(f"role {role!r}: expected a ClassWithInitArgs, got {type(spec).__name__}")
    if not class_dict:
        raise UserError("create_colocated_worker_cls needs at least one role")
    return ColocatedClassWithInitArgs(class_dict)
