"""The actor: the policy that is trained."""

from typing import Any

from podium.protocol import DataProto, Dispatch, register
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
        **schedule: int,
    ):
        super().__init__(config, objective, **schedule)
        self._model, self._infer_rows = model, infer_rows
        self._outputs = LogProbs(temperature, entropy_grad, sum_pi_squared)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model and lays it out over the ranks."""
        model = self._model
        recompute = model.enable_gradient_checkpointing
        self._start_training(ModelSpec(model.path, self._outputs, model.trust_remote_code, recompute))

    @register(dispatch_mode=ENGINE_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` and ``entropys`` (B, R) of the responses under the policy as it is.

        And ``sum_pi_squared`` (B, R), where it was asked for.
        """
        outputs = self._engine.infer(tensors_of(data), self._infer_rows)
        names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return DataProto.from_dict({names.get(name, name): values for name, values in outputs.items()})

    @register(dispatch_mode=ENGINE_COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> list[dict[str, float]]:
        """Trains on the batch; returns the metrics of each optimizer step, the same on every rank."""
        return self._update(data)

    def _sync_ends(self) -> tuple[str, Source | None, RolloutEngine | None]:
        rollout = self.peer("rollout")
        return "actor", self._engine.pieces, rollout.engine if rollout is not None else None
