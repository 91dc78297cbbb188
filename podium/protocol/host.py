"""Inside a worker process: constructs the roles and runs their methods."""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import inspect
import os
import pickle
import signal
import time
import traceback
from collections.abc import Mapping
from typing import Any

from podium.protocol.dispatch import registered_methods
from podium.protocol.errors import WorkerError
from podium.protocol.future import DataProtoFuture, Future
from podium.protocol.sharding import drop_padding, real_rows
from podium.protocol.worker import ProcessContext, constructing
from podium.utils.errors import UserError
from podium.utils.memory_ledger import LEDGER
from podium.utils.out_of_memory import is_out_of_memory, what_was_tried

_methods = functools.cache(registered_methods)

MESH_QUERY = "@mesh"
"""A pseudo-method: the role's (dp_rank, is_collect) in the mesh named by the argument."""
PING = "@ping"
"""A pseudo-method that does nothing."""

_LINE_BYTES = 512


class RoleHost:
    """The roles of one rank."""

    def __init__(self, context: ProcessContext) -> None:
        self.context = context
        self._loop: asyncio.AbstractEventLoop | None = None
        self._doing: int | None = None

    def construct(self, roles: Mapping[str, Any]) -> None:
        """Make every role (a ClassWithInitArgs) in the order of the dict.

        Raises:
            WorkerError, UserError: a constructor raised.
        """
        os.environ.update(self.context.env())
        self._dump_stacks_on_demand()
        for role, spec in roles.items():
            self._say(f"in {role}.__init__")
            try:
                with constructing(self.context):
                    self.context.roles[role] = spec()
            except UserError as e:
                self.note(e, role, "__init__")
                raise
            except Exception as e:
                raise self.report(e, role, "__init__") from e
        self._say("waiting for a call")

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], answer: bool = True) -> Any:
        """Run a method; futures are materialised before it and padding rows dropped after it.

        Raises:
            WorkerError, UserError: it raised.
        """
        if method == PING:
            return None
        self._say(f"in {role}.{method}")
        try:
            instance = self.context.roles[role]
            if method == MESH_QUERY:
                return _mesh(instance, role, *args)
            spec = _methods(instance.__class__).get(method)
            if spec is None or spec.materialize_futures:
                args = tuple(_materialize(a) for a in args)
                kwargs = {k: _materialize(v) for k, v in kwargs.items()}
            values = [*args, *kwargs.values()]
            padded = real_rows(values)
            with LEDGER(role, method):
                result = getattr(instance, method)(*args, **kwargs)
                if inspect.isawaitable(result):
                    result = self._run(result)
            if padded is None:
                padded = next((a.padding for a in values if isinstance(a, DataProtoFuture) and a.padding), None)
            if padded is not None:
                result = drop_padding(result, padded)
            return result if answer else None
        except UserError as e:
            self.note(e, role, method)
            raise
        except WorkerError:  # of another worker, whose answer this one was waiting for
            raise
        except Exception as e:
            raise self.report(e, role, method) from e
        finally:
            self._say("waiting for a call")

    def _dump_stacks_on_demand(self) -> None:
        """Where PODIUM_STACKS names a folder: on SIGUSR1, every thread's stack goes to a file of this process there.

        Beside it, ``.doing`` says what the process is at, and since when.
        """
        if folder := os.environ.get("PODIUM_STACKS"):
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"rank_{self.context.rank}_pid_{os.getpid()}")
            self._stacks = open(path + ".txt", "w")  # noqa: SIM115 - as long as the process
            faulthandler.register(signal.SIGUSR1, self._stacks)
            self._doing = os.open(path + ".doing", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)
            self._say("starting")

    def _say(self, what: str) -> None:
        if self._doing is not None:
            line = f"{time.time():.3f} {'+'.join(self.context.roles) or 'worker'} rank {self.context.rank}\t{what}\n"
            os.pwrite(self._doing, line.ljust(_LINE_BYTES, "\0").encode(), 0)

    def note(self, e: UserError, role: str, method: str) -> None:
        """Say on ``e``, which travels as it is, where it comes from."""
        e.add_note(f"raised by {role}.{method} on rank {self.context.rank}")

    def report(self, e: Exception, role: str, method: str) -> WorkerError:
        """What the driver sees of ``e``: role, rank, method and traceback."""
        rank = self.context.rank
        text = "".join(traceback.format_exception(e))
        error = WorkerError(
            f"{role}.{method} failed on rank {rank}: {type(e).__name__}: {e}\n\nTraceback on rank {rank}:\n{text}",
            role=role,
            rank=rank,
            method=method,
            remote_traceback=text,
        )
        if is_out_of_memory(e):
            error.out_of_memory = what_was_tried(e)
        return error

    def _run(self, awaitable: Any) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(awaitable)


def portable(e: BaseException) -> BaseException:
    """``e``, or if it does not survive pickling, a plain one with its message."""
    try:
        copied = pickle.loads(pickle.dumps(e))
        if isinstance(copied, type(e)) and str(copied) == str(e):
            return e
    except Exception:  # whatever a user's exception does when pickled, its message must arrive
        pass
    return UserError(str(e)) if isinstance(e, UserError) else WorkerError(str(e))


def _materialize(value: Any) -> Any:
    return value.get() if isinstance(value, DataProtoFuture | Future) else value


def _mesh(instance: Any, role: str, mesh: str) -> tuple[int, bool]:
    known = getattr(instance, "_meshes", {})
    if mesh not in known:
        raise UserError(
            f"{role} has not placed itself in mesh {mesh!r} (register_mesh or register_megatron_mesh); "
            f"it knows {sorted(known)}"
        )
    return known[mesh]
