"""The critic: the value of each state that a response passes through."""

from typing import Any

from podium.protocol import DataProto, Dispatch, register
from podium.workers.engine.base import LossFn
from podium.workers.engine.spec import ModelSpec, Values
from podium.workers.training import ENGINE_COMPUTE_METRIC, ENGINE_COMPUTE_PROTO, TrainedRole, tensors_of


class CriticWorker(TrainedRole):
    """Values and updates of a value model.

    Args:
        model_path: Hugging Face directory of the backbone.
        seed: of what is drawn when the model is made.
        config, objective, schedule: as for `TrainedRole`; the config has ``model``, too.
    """

    def __init__(self, model_path: str, config: Any, objective: LossFn, *, seed: int = 0, **schedule: int):
        super().__init__(config, objective, **schedule)
        self._model_path, self._seed = model_path, seed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the backbone, puts a value head on it, and lays both out over the ranks."""
        self._start_training(ModelSpec.trained(self._config.model, Values(), self._seed, self._model_path))

    @register(dispatch_mode=ENGINE_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """``values`` (B, R): position t holds the value of the state in which response token t is chosen."""
        return DataProto.from_dict(self._engine.infer(tensors_of(data), self._micro_batch_rows))

    @register(dispatch_mode=ENGINE_COMPUTE_METRIC)
    def update_critic(self, data: DataProto) -> list[dict[str, float]]:
        """Trains on the batch; returns the metrics of each optimizer step, the same on every rank."""
        return self._update(data)
