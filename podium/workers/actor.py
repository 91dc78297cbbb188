"""The actor: the policy that is trained."""

from contextlib import AbstractContextManager
from typing import Any

from podium.protocol import DataProto, Dispatch, register
from podium.utils.memory_buffer import FlatStage
from podium.workers.engine.base import LossFn
from podium.workers.engine.spec import LogProbs, ModelSpec
from podium.workers.rollout.base import RolloutEngine
from podium.workers.training import ENGINE_COMPUTE_METRIC, ENGINE_COMPUTE_PROTO, TrainedRole, tensors_of
from podium.workers.weight_sync.role import Source, SyncRole


class ActorWorker(TrainedRole, SyncRole):
    """Log-probs and updates of a causal language model.

    Args:
        model: has ``path``, ``trust_remote_code``, ``enable_gradient_checkpointing``.
        temperature: of sampling; log-probs are taken there.
        entropy_grad: the objective differentiates the entropy.
        sum_pi_squared: `compute_log_prob` gives the sum of squared probabilities too.
        infer_rows: sequences in one forward without gradients.
        ref_rows: the same for the reference, where it is the base of a model with LoRA.
        seed: of what is drawn when the model is made.
        sync_adapter: of a model with LoRA, send the adapter alone to the rollout.
        config, objective, schedule: as for `TrainedRole`.
    """

    def __init__(
        self,
        model: Any,
        config: Any,
        objective: LossFn,
        *,
        temperature: float = 1.0,
        entropy_grad: bool = False,
        sum_pi_squared: bool = False,
        infer_rows: int,
        ref_rows: int = 0,
        seed: int = 0,
        sync_adapter: bool = False,
        **schedule: int,
    ):
        super().__init__(config, objective, **schedule)
        self._model, self._infer_rows, self._ref_rows, self._seed = model, infer_rows, ref_rows, seed
        self._sync_adapter = sync_adapter
        self._outputs = LogProbs(temperature, entropy_grad, sum_pi_squared)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model and lays it out over the ranks."""
        self._start_training(ModelSpec.trained(self._model, self._outputs, self._seed))

    @register(dispatch_mode=ENGINE_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` and ``entropys`` (B, R) of the responses under the policy as it is.

        And ``sum_pi_squared`` (B, R), where it was asked for.
        """
        outputs = self._engine.infer(tensors_of(data), self._infer_rows)
        names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return DataProto.from_dict({names.get(name, name): values for name, values in outputs.items()})

    @register(dispatch_mode=ENGINE_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` (B, R): with LoRA the frozen base is the reference, so that no second model is needed."""
        with self._engine.adapter_off():
            outputs = self._engine.infer(tensors_of(data), self._ref_rows)
        return DataProto.from_dict({"ref_log_prob": outputs["log_probs"]})

    @register(dispatch_mode=ENGINE_COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> list[dict[str, float]]:
        """Trains on the batch; returns the metrics of each optimizer step, the same on every rank."""
        return self._update(data)

    def _sync_ends(self) -> tuple[str, Source | None, RolloutEngine | None]:
        rollout = self.peer("rollout")
        source = self._engine.adapter_pieces if self._sync_adapter else self._engine.pieces
        return "actor", source, rollout.engine if rollout is not None else None

    def _flat_stage(self) -> FlatStage | None:
        return self._engine.flat_stage()

    def _weights_at_hand(self) -> AbstractContextManager[None]:
        return self._engine.phase("params")
