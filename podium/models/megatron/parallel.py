"""How a Megatron model lies over ranks. Plain data: planning a run imports neither torch nor megatron-core."""

from dataclasses import dataclass, fields
from typing import Any

from podium.utils.errors import UserError

KEYS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "stage_layers": "pipeline_stage_layers",
}
"""Field of `MegatronLayout` -> the configuration key it is read from, which errors name."""


@dataclass(frozen=True)
class MegatronLayout:
    """Sizes of the parallel dimensions of a model; data parallel takes the ranks that they leave.

    Raises:
        UserError: sizes that do not go together; names the configuration key.
    """

    tp: int = 1
    """Tensor parallel: heads, hidden units of the MLP and vocabulary are split."""
    pp: int = 1
    """Pipeline parallel: layers are split."""
    vpp: int = 1
    """Chunks of layers a pipeline rank holds (interleaved 1F1B); 1 is plain 1F1B."""
    cp: int = 1
    """Context parallel: the tokens of a sequence are split."""
    ep: int = 1
    """Expert parallel: the experts of a layer are split over ranks that are otherwise tensor or data parallel."""
    sequence_parallel: bool = False
    """Split activations between the tensor-parallel blocks by tokens."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each of the pp * vpp stages, in the order in which a token passes them. Empty: alike."""

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "cp", "ep"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise UserError(f"{KEYS[name]}={size}: expected a whole number of at least 1")
        if self.vpp > 1 and self.pp == 1:
            raise UserError(
                f"{KEYS['vpp']}={self.vpp} has no effect with {KEYS['pp']}=1: there is nothing to interleave"
            )
        if self.sequence_parallel and self.tp == 1:
            raise UserError(f"sequence_parallel=true has no effect with {KEYS['tp']}=1")
        if self.stage_layers and len(self.stage_layers) != self.stages:
            raise UserError(
                f"{KEYS['stage_layers']}={list(self.stage_layers)}: expected {self.stages} numbers, one for each stage "
                f"of {KEYS['pp']} x {KEYS['vpp']} = {self.pp} x {self.vpp}, and got {len(self.stage_layers)}"
            )
        if any(count < 1 for count in self.stage_layers):
            raise UserError(f"{KEYS['stage_layers']}={list(self.stage_layers)}: each stage needs at least one layer")

    @classmethod
    def from_config(cls, config: Any) -> "MegatronLayout":
        """The layout that a configuration section names by the keys in `KEYS`; None and absent are the default."""
        given = {field.name: getattr(config, KEYS[field.name], None) for field in fields(cls)}
        if given["stage_layers"] is not None:
            given["stage_layers"] = tuple(given["stage_layers"])
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def stages(self) -> int:
        """Pieces that the layers are cut into."""
        return self.pp * self.vpp

    @property
    def model_ranks(self) -> int:
        """Ranks that together hold one copy of the model and work on the same sequences."""
        return self.tp * self.pp * self.cp

    @property
    def expert_tp(self) -> int:
        """Ranks that one expert's matrices are split over: with expert parallel, whole experts lie on a rank."""
        return 1 if self.ep > 1 else self.tp

    def dp(self, ranks: int) -> int:
        """Data-parallel size on so many ranks.

        Raises:
            UserError: the ranks do not divide.
        """
        if ranks % self.model_ranks:
            raise UserError(
                f"{ranks} ranks do not divide by {KEYS['tp']} x {KEYS['pp']} x {KEYS['cp']} = "
                f"{self.tp} x {self.pp} x {self.cp}"
            )
        if (ranks // self.pp) % (self.ep * self.expert_tp):
            raise UserError(
                f"{KEYS['ep']}={self.ep}: the {ranks // self.pp} ranks of a pipeline stage do not divide by it"
            )
        return ranks // self.model_ranks

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in ("tp", "pp", "vpp", "cp", "ep")}
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1] or ["tp1"]
        words += ["sp"] if self.sequence_parallel else []
        words += [f"layers {'+'.join(map(str, self.stage_layers))}"] if self.stage_layers else []
        return " ".join(words)

    def layers_by_stage(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each stage, in the order in which a token passes them.

        Raises:
            UserError: so many layers cannot be split so.
        """
        if self.stage_layers:
            if sum(self.stage_layers) != num_layers:
                raise UserError(
                    f"{KEYS['stage_layers']}={list(self.stage_layers)} are {sum(self.stage_layers)} layers and the "
                    f"model has {num_layers}"
                )
            return self.stage_layers
        if num_layers % self.stages:
            raise UserError(
                f"{KEYS['pp']} x {KEYS['vpp']} = {self.pp} x {self.vpp}: the model's {num_layers} layers do not divide "
                f"by it; give the layers of each stage in {KEYS['stage_layers']}"
            )
        return (num_layers // self.stages,) * self.stages


_current: MegatronLayout | None = None
_groups: list[Any] = []
"""The process groups of the current layout: torch keeps a group, and its threads, until it is destroyed."""


def initialize(layout: MegatronLayout) -> None:
    """Makes megatron-core's process groups over the world of this process; with the same layout again, does nothing.

    Every rank of the world calls it. The models of one process (actor, critic, reference) share the groups.

    Raises:
        UserError: megatron-core is not installed, the ranks do not divide, or the process has another layout already.
    """
    global _current
    if _current is not None:
        if _current != layout:
            raise UserError(
                f"the roles of one process share one Megatron layout, and this process has ({_current}): asked for "
                f"({layout}); give all its roles the same sizes, or pools of their own"
            )
        return
    import torch

    from podium.models.megatron import cpu_backend
    from podium.utils.device import init_distributed, preserve_torch_state

    init_distributed()
    layout.dp(torch.distributed.get_world_size())
    cpu_backend.install()
    from megatron.core import parallel_state, tensor_parallel

    before = _process_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        create_gloo_process_groups=False,
    )
    _groups.extend(group for group in _process_groups() if group not in before)
    with preserve_torch_state():  # the random streams that Megatron keeps a rank; nothing here draws from them
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    _current = layout


def current() -> MegatronLayout:
    """The layout of this process."""
    assert _current is not None, "initialize comes first"
    return _current


def destroy() -> None:
    """Ends the process groups of `initialize`, so that another layout can follow. Every rank calls it."""
    global _current
    import torch
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()  # forgets most of them, and no more
    for group in _process_groups():
        if group in _groups:
            torch.distributed.destroy_process_group(group)
    _groups.clear()
    _current = None


def _process_groups() -> list[Any]:
    """Every process group that torch keeps in this process."""
    from torch.distributed.distributed_c10d import _world

    return list(_world.pg_map)
