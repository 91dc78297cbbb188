"""How a call on a worker group becomes calls on its ranks, and how their answers become one.

Whether an argument is sharded, broadcast or sent to one rank follows from its *type* alone:

* ``DataProto``, ``DataProtoFuture``, ``TensorDict``: sharded by the modes that shard, broadcast by the others;
* ``PerRank([...])``: element i goes to rank i, in every mode;
* ``Broadcast(x)``: every rank gets ``x``, in every mode;
* in ``ALL_TO_ALL`` and ``DP_COMPUTE`` a ``list`` or ``tuple`` is rank-addressed too;
* anything else is broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar

from tensordict import TensorDict

from podium.protocol.data import DataProto
from podium.protocol.future import DataProtoFuture
from podium.protocol.sharding import shard

F = TypeVar("F", bound=Callable[..., Any])
Dispatched = tuple[tuple[list[Any], ...], dict[str, list[Any]]]

SPEC_ATTRIBUTE = "__podium_method__"


class PerRank(list[Any]):
    """A rank-addressed argument: element i goes to rank i."""


@dataclass(frozen=True)
class Broadcast:
    """An argument that every rank gets whole, also where its type would be sharded."""

    value: Any


class Execute(Enum):
    """Which ranks run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class DispatchMode:
    """A way to call.

    Attributes:
        name: as in ``Dispatch.<name>``.
        dispatch_fn: ``(group, *args, **kwargs) -> (args, kwargs)``; every argument is a list with one value a rank.
        collect_fn: ``(group, outputs) -> result``; one output a rank, None for ranks not in ``collect_ranks``.
        collect_ranks: ``(group) -> ranks`` whose answers are sent back (None: all).
        gives_data_proto: whether a non-blocking call gives a DataProtoFuture.
        rank_zero: only rank 0 runs, and its value is the result.
    """

    name: str
    dispatch_fn: Callable[..., Dispatched]
    collect_fn: Callable[[Any, list[Any]], Any]
    collect_ranks: Callable[[Any], Sequence[int]] | None = None
    gives_data_proto: bool = False
    rank_zero: bool = False

    def __reduce__(self) -> Any:
        # Functions made by factories do not pickle; a worker that gets a class by value needs only the name.
        return _find_mode, (self.name,)


def _find_mode(name: str) -> Any:
    return getattr(Dispatch, name, name)


# -------------------------------------------------------------------- dispatching


def _each(group: Any, fn: Callable[[Any], list[Any]], args: Sequence[Any], kwargs: dict[str, Any]) -> Dispatched:
    def one(value: Any) -> list[Any]:
        if isinstance(value, PerRank):
            return _per_rank(value, group.world_size)
        if isinstance(value, Broadcast):
            return [value.value] * group.world_size
        return fn(value)

    return tuple(one(a) for a in args), {k: one(v) for k, v in kwargs.items()}


def _per_rank(value: Sequence[Any], world_size: int) -> list[Any]:
    if len(value) != world_size:
        raise ValueError(f"a rank-addressed argument has {len(value)} elements for {world_size} ranks")
    return list(value)


def _shards(value: Any, n: int) -> list[Any] | None:
    if isinstance(value, DataProto):
        return list(shard(value, n))
    if isinstance(value, DataProtoFuture):
        return list(value.chunk(n))
    if isinstance(value, TensorDict):
        return [s.to_tensordict() for s in shard(DataProto.from_tensordict(value), n)]
    return None


def _same_length(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    sizes = {len(v) for v in [*args, *kwargs.values()] if isinstance(v, DataProto | TensorDict) and len(v)}
    if len(sizes) > 1:
        raise ValueError(f"batches of one call have different lengths: {sorted(sizes)}")


def dispatch_one_to_all(group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Every rank gets every argument."""
    return _each(group, lambda v: [v] * group.world_size, args, kwargs)


def dispatch_all_to_all(group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Lists are rank-addressed, everything else is broadcast."""

    def one(value: Any) -> list[Any]:
        if isinstance(value, list | tuple):
            return _per_rank(value, group.world_size)
        return [value] * group.world_size

    return _each(group, one, args, kwargs)


def dispatch_dp_compute(group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Lists are rank-addressed, batches sharded, everything else is broadcast."""
    _same_length(args, kwargs)

    def one(value: Any) -> list[Any]:
        if isinstance(value, list | tuple):
            return _per_rank(value, group.world_size)
        return _shards(value, group.world_size) or [value] * group.world_size

    return _each(group, one, args, kwargs)


def dispatch_dp_compute_data_proto(group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """Batches are sharded, everything else is broadcast."""
    _same_length(args, kwargs)
    return _each(group, lambda v: _shards(v, group.world_size) or [v] * group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(group: Any, *args: Any, **kwargs: Any) -> Dispatched:
    """As ``dispatch_dp_compute_data_proto``, with a function first, which every rank gets.

    Raises:
        TypeError: the first argument is not callable.
    """
    if not args or not callable(args[0]):
        raise TypeError("DP_COMPUTE_PROTO_WITH_FUNC: the first argument must be a function")
    return dispatch_dp_compute_data_proto(group, *args, **kwargs)


# -------------------------------------------------------------------- collecting


def collect_all(group: Any, outputs: list[Any]) -> list[Any]:
    """One value a rank."""
    return outputs


def collect_data_proto(group: Any, outputs: list[Any]) -> Any:
    """The ranks' batches as one; None if every rank returned None.

    Raises:
        TypeError: a rank returned something else.
    """
    if all(o is None for o in outputs):
        return None
    if all(isinstance(o, TensorDict) for o in outputs):
        return DataProto.concat([DataProto.from_tensordict(o) for o in outputs]).to_tensordict()
    for rank, value in enumerate(outputs):
        if not isinstance(value, DataProto):
            raise TypeError(
                f"answer {rank} is a {type(value).__name__}; this dispatch mode collects DataProto "
                "(DP_COMPUTE_METRIC collects a list of anything)"
            )
    return DataProto.concat(outputs)


# -------------------------------------------------------------------- meshes


def _mesh(group: Any, mesh: str) -> tuple[list[int], list[int]]:
    """Each rank's shard number, and the ranks that answer in the order of their shards."""
    info = group._mesh_info(mesh)
    shard_of = [s for s, _ in info]
    answers = sorted((s, rank) for rank, (s, collects) in enumerate(info) if collects)
    n = max(shard_of) + 1
    if set(shard_of) != set(range(n)) or [s for s, _ in answers] != list(range(n)):
        raise ValueError(
            f"mesh {mesh!r}: ranks have dp ranks {shard_of}, and {[r for _, r in answers]} answer; "
            "expected every dp rank from 0 up, each with exactly one answering rank"
        )
    return shard_of, [rank for _, rank in answers]


def make_nd_compute_dataproto_dispatch_fn(mesh: str) -> DispatchMode:
    """A mode for a mesh of ranks: those of one tp/pp/cp group get the same shard, and one of them answers.

    ``mesh`` is the name under which each worker called ``register_mesh(mesh, dp_rank, is_collect)``.
    """

    def collect(group: Any, outputs: list[Any]) -> Any:
        return collect_data_proto(group, [outputs[rank] for rank in _mesh(group, mesh)[1]])

    return DispatchMode(f"nd_{mesh}", _mesh_dispatch(mesh), collect, _mesh_answers(mesh), gives_data_proto=True)


def make_nd_compute_dispatch_fn(mesh: str) -> DispatchMode:
    """As `make_nd_compute_dataproto_dispatch_fn`; the answers may be anything, and the result lists one a shard."""

    def collect(group: Any, outputs: list[Any]) -> list[Any]:
        return [outputs[rank] for rank in _mesh(group, mesh)[1]]

    return DispatchMode(f"nd_{mesh}_list", _mesh_dispatch(mesh), collect, _mesh_answers(mesh))


def _mesh_dispatch(mesh: str) -> Callable[..., Dispatched]:
    def dispatch(group: Any, *args: Any, **kwargs: Any) -> Dispatched:
        shard_of, answers = _mesh(group, mesh)
        _same_length(args, kwargs)

        def one(value: Any) -> list[Any]:
            shards = _shards(value, len(answers))
            return [value] * group.world_size if shards is None else [shards[s] for s in shard_of]

        return _each(group, one, args, kwargs)

    return dispatch


def _mesh_answers(mesh: str) -> Callable[[Any], Sequence[int]]:
    return lambda group: _mesh(group, mesh)[1]


MEGATRON_MESH, MEGATRON_PP_AS_DP_MESH = "megatron", "megatron_pp_as_dp"


class Dispatch:
    """The dispatch modes by name; ``register_dispatch_mode`` adds to them.

    A batch is *sharded* over ranks (see ``dispatch_valid`` for uneven ones); results are a list with one value a rank
    unless said otherwise.
    """

    ONE_TO_ALL: ClassVar[DispatchMode] = DispatchMode("ONE_TO_ALL", dispatch_one_to_all, collect_all)
    """Every rank gets the same arguments."""
    ALL_TO_ALL: ClassVar[DispatchMode] = DispatchMode("ALL_TO_ALL", dispatch_all_to_all, collect_all)
    """Lists are rank-addressed."""
    RANK_ZERO: ClassVar[DispatchMode] = DispatchMode("RANK_ZERO", dispatch_one_to_all, collect_all, rank_zero=True)
    """Only rank 0 runs; its value is the result."""
    DP_COMPUTE: ClassVar[DispatchMode] = DispatchMode("DP_COMPUTE", dispatch_dp_compute, collect_all)
    """Batches are sharded, lists rank-addressed."""
    DP_COMPUTE_PROTO: ClassVar[DispatchMode] = DispatchMode(
        "DP_COMPUTE_PROTO", dispatch_dp_compute_data_proto, collect_data_proto, gives_data_proto=True
    )
    """Batches are sharded; the ranks' DataProtos are concatenated."""
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[DispatchMode] = DispatchMode(
        "DP_COMPUTE_PROTO_WITH_FUNC",
        dispatch_dp_compute_data_proto_with_func,
        collect_data_proto,
        gives_data_proto=True,
    )
    """As DP_COMPUTE_PROTO, the first argument being a function."""
    DP_COMPUTE_METRIC: ClassVar[DispatchMode] = DispatchMode(
        "DP_COMPUTE_METRIC", dispatch_dp_compute_data_proto, collect_all
    )
    """Batches are sharded; results are a list."""
    MEGATRON_COMPUTE_PROTO: ClassVar[DispatchMode] = make_nd_compute_dataproto_dispatch_fn(MEGATRON_MESH)
    """Batches are sharded over dp; every rank of a tp/pp/cp group gets the same shard (``register_megatron_mesh``)."""
    MEGATRON_PP_AS_DP_PROTO: ClassVar[DispatchMode] = make_nd_compute_dataproto_dispatch_fn(MEGATRON_PP_AS_DP_MESH)
    """Batches are sharded over dp x pp; every rank of a tp/cp group gets the same shard."""


def register_dispatch_mode(
    name: str, dispatch_fn: Callable[..., Dispatched], collect_fn: Callable[[Any, list[Any]], Any]
) -> DispatchMode:
    """Add ``Dispatch.<name>``.

    Raises:
        ValueError: the name is taken, or not an identifier.
    """
    if not name.isidentifier() or hasattr(Dispatch, name):
        raise ValueError(f"dispatch mode {name!r} is taken or not an identifier")
    mode = DispatchMode(name, dispatch_fn, collect_fn)
    setattr(Dispatch, name, mode)
    return mode


# -------------------------------------------------------------------- registering


@dataclass(frozen=True)
class MethodSpec:
    """How a worker's method is called from the driver."""

    mode: DispatchMode
    execute: Execute
    blocking: bool
    materialize_futures: bool


def register(
    dispatch_mode: DispatchMode | dict[str, Callable[..., Any]] | None = None,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[F], F]:
    """Mark a Worker's method as callable from the driver.

    Args:
        dispatch_mode: a ``Dispatch`` member (default ALL_TO_ALL), what ``make_nd_compute_dataproto_dispatch_fn`` gives,
            or ``{"dispatch_fn": f, "collect_fn": g}``.
        execute_mode: ``Execute.RANK_ZERO`` runs rank 0 only and returns its value.
        blocking: False returns a ``DataProtoFuture`` (modes that collect DataProto) or a ``Future`` at once.
        materialize_futures: futures among the arguments become batches before the method sees them.

    Raises:
        TypeError: not a dispatch mode.
    """
    mode = Dispatch.ALL_TO_ALL if dispatch_mode is None else dispatch_mode
    if isinstance(mode, dict):
        mode = DispatchMode("custom", mode["dispatch_fn"], mode["collect_fn"])
    if not isinstance(mode, DispatchMode):
        raise TypeError(
            f"dispatch_mode must be a Dispatch member or a dict with dispatch_fn and collect_fn, got {mode!r}"
        )
    spec = MethodSpec(mode, execute_mode, blocking, materialize_futures)

    def mark(fn: F) -> F:
        setattr(fn, SPEC_ATTRIBUTE, spec)
        return fn

    return mark


def registered_methods(cls: type) -> dict[str, MethodSpec]:
    """Registered methods of a class by name; an override without ``@register`` keeps its parent's."""
    specs: dict[str, MethodSpec] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            spec = getattr(member, SPEC_ATTRIBUTE, None)
            if isinstance(spec, MethodSpec):
                specs[name] = spec
    return specs
