"""A worker that holds one Megatron engine after the other, each in the layout it is told."""

import gc
from typing import Any

import torch
from megatron.core import tensor_parallel

from podium.models.megatron import parallel
from podium.models.megatron.parallel import MegatronLayout
from podium.protocol import DataProto, Dispatch, register
from podium.trainer.config.shared import MegatronConfig
from podium.utils.memory_buffer import ALIGNMENT
from podium.workers.engine.base import NonFiniteError, Tensors
from podium.workers.engine.megatron import MegatronEngine
from podium.workers.engine.spec import LogProbs, ModelSpec, Outputs, Training
from podium.workers.training import ENGINE_COMPUTE_METRIC, ENGINE_COMPUTE_PROTO, EngineRole, tensors_of
from tests.workers.engine.hosts import TEMPERATURE, RestingHost, small_steps

LOG_PROBS = LogProbs(TEMPERATURE, entropy_grad=True, sum_pi_squared=True)


class MegatronHost(RestingHost, EngineRole):
    """As `EngineHost`."""

    @register(Dispatch.ONE_TO_ALL)
    def build(
        self,
        path: str,
        config: MegatronConfig,
        *,
        outputs: Outputs = LOG_PROBS,
        optim: Any = None,
        total_steps: int = 10,
        grad_clip: float = 1.0,
        recompute: bool = False,
        frozen: bool = False,
    ) -> None:
        if parallel._current not in (None, MegatronLayout.from_config(config)):
            # First the engine: a process group that something still refers to keeps its threads, about fifty a layout.
            self._engine: Any = None
            gc.collect()
            parallel.destroy()
        training = None if frozen else Training(optim or small_steps(), total_steps, grad_clip)
        self._start("megatron", Section(config), ModelSpec(path, outputs, recompute=recompute), training)

    @property
    def engine(self) -> MegatronEngine:
        assert isinstance(self._engine, MegatronEngine)
        return self._engine

    @register(Dispatch.ONE_TO_ALL)
    def set_head(self, weight: torch.Tensor) -> None:
        """Of a value model, (1, hidden), which starts at zero."""
        for piece in self.engine.pieces():
            if piece.name == "score.weight":
                piece.tensor.copy_(weight)

    @register(ENGINE_COMPUTE_PROTO)
    def infer(self, data: DataProto, micro: int) -> DataProto:
        return DataProto.from_dict(self.engine.infer(tensors_of(data), micro))

    @register(ENGINE_COMPUTE_PROTO)
    def infer_everywhere(self, data: DataProto, micro: int) -> DataProto:
        """`infer`; keeps what this rank got, whether it answers or not."""
        self.got = self.engine.infer(tensors_of(data), micro)
        return DataProto.from_dict(self.got)

    @register(Dispatch.ONE_TO_ALL)
    def kept(self) -> tuple[int, Tensors]:
        return self.engine.placement.dp_rank, self.got

    @register(ENGINE_COMPUTE_METRIC)
    def train(self, data: DataProto, loss_fn: Any, micro: int) -> dict[str, float] | str:
        try:
            return self.engine.train(tensors_of(data), loss_fn, micro)
        except NonFiniteError as error:
            return str(error)

    @register(Dispatch.ONE_TO_ALL)
    def spoil(self, rank: int) -> None:
        """NaN in a parameter of one rank."""
        if self.rank == rank:
            next(self.engine._modules[0].parameters()).detach().view(-1)[0] = torch.nan

    @register(Dispatch.ONE_TO_ALL)
    def weights(self, dtype: str = "float32") -> Tensors:
        return {name: tensor.clone() for name, tensor in self.engine.export(getattr(torch, dtype))}

    @register(Dispatch.ONE_TO_ALL)
    def optimizer_state(self) -> list[Any]:
        """This rank's part of the optimizer's state and master weights, and the schedule."""
        optimizer = self.engine._optimizer
        assert optimizer is not None
        parts = [part.optimizer for part in optimizer.inner.chained_optimizers]
        with self.engine.phase("params", "optimizer"):
            state = [{k: v.clone() for k, v in s.items()} for part in parts for s in part.state.values()]
            masters = [p.detach().clone() for part in parts for group in part.param_groups for p in group["params"]]
        return [state, masters, [group["lr"] for group in optimizer.inner.param_groups], optimizer.steps]

    @register(Dispatch.ONE_TO_ALL)
    def flat_memory(self) -> list[dict[str, Any]]:
        """Of each chunk, the storages that parameters, gradients, optimizer and weight sync use."""
        optimizer = self.engine._optimizer
        assert optimizer is not None
        masters = [
            p for part in optimizer.inner.chained_optimizers for g in part.optimizer.param_groups for p in g["params"]
        ]
        facts = []
        for wrapped, module in zip(self.engine._pipeline._chunks, self.engine._modules, strict=True):
            parameters = list(module.parameters())
            own = _storages(parameters)
            facts.append(
                {
                    "parameters": own,
                    "buffers": _storages([buffer.param_data for buffer in wrapped.buffers]),
                    "gradients": _storages([parameter.main_grad for parameter in parameters]),
                    "gradient buffers": _storages([buffer.grad_data for buffer in wrapped.buffers]),
                    "sync": own & _storages([piece.tensor for piece in self.engine.pieces()]),
                    "optimizer": own & _storages(masters),
                    "aligned": all(parameter.data_ptr() % ALIGNMENT == 0 for parameter in parameters),
                }
            )
        return facts

    @register(Dispatch.ONE_TO_ALL)
    def save(self, path: str) -> None:
        self.engine.save(path)

    @register(Dispatch.ONE_TO_ALL)
    def take_snapshot(self) -> None:
        self.write = self.engine.snapshot()

    @register(Dispatch.ONE_TO_ALL)
    def write_snapshot(self, path: str) -> None:
        self.write(path)

    @register(Dispatch.ONE_TO_ALL)
    def random_state(self) -> dict[str, Any]:
        return self.engine.random_state()

    @register(Dispatch.ONE_TO_ALL)
    def draw(self) -> None:
        """Moves the random stream of this rank's dropout on."""
        with tensor_parallel.get_cuda_rng_tracker().fork():
            torch.rand(3)

    @register(Dispatch.ONE_TO_ALL)
    def set_random_state(self, states: list[dict[str, Any]]) -> None:
        self.engine.set_random_state(states[self.rank])

    @register(Dispatch.ONE_TO_ALL)
    def load(self, path: str) -> None:
        self.engine.load(path)

    @register(Dispatch.ONE_TO_ALL)
    def save_hf(self, path: str) -> None:
        self.engine.save_hf(path)


class Section:
    """What a role's configuration is to an engine."""

    def __init__(self, megatron: MegatronConfig):
        self.megatron = megatron


def _storages(tensors: list[torch.Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
