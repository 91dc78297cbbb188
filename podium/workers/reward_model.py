"""The reward model: one score a response, trained on preferences, or frozen beside the actor."""

from typing import Any

from podium.protocol import DataProto, Dispatch, register
from podium.utils.torch_functional import place_on_last_token, take_last_token
from podium.workers.engine.base import LossFn, TrainEngine
from podium.workers.engine.spec import ModelSpec, Scores
from podium.workers.training import (
    ENGINE_COMPUTE_METRIC,
    ENGINE_COMPUTE_PROTO,
    EngineRole,
    TrainedRole,
    tensors_of,
)


class RewardModelWorker(EngineRole):
    """Scores of a frozen reward model.

    Args:
        model: has ``path``, ``trust_remote_code``.
        strategy: name of the engine.
        config: has the section of that engine.
        infer_rows: sequences in one forward.
    """

    def __init__(self, model: Any, strategy: str, config: Any, *, infer_rows: int):
        super().__init__()
        self._model, self._strategy, self._config = model, strategy, config
        self._infer_rows = infer_rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model and lays it out over the ranks."""
        model = ModelSpec(self._model.path, Scores(), self._model.trust_remote_code)
        self._start(self._strategy, self._config, model)

    @register(dispatch_mode=ENGINE_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """``rm_scores`` (B, R): each sequence's score on its last valid response token, 0 elsewhere."""
        return _rm_scores(self._engine, data, self._infer_rows)


class RewardModelTrainer(TrainedRole):
    """A reward model that is being trained on preference pairs (`collate_pairs`).

    Args:
        config: as for `TrainedRole`; has ``model``, too.
        pad_token_id: goes into the export, where transformers finds the last token of a padded sequence by it.
        seed: of what is drawn when the model is made.
        objective, schedule: as for `TrainedRole`; rows count sequences, so they are even.
    """

    def __init__(self, config: Any, objective: LossFn, *, pad_token_id: int, seed: int = 0, **schedule: int):
        super().__init__(config, objective, **schedule)
        self._pad_token_id, self._seed = pad_token_id, seed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the backbone, puts a head on it that starts at zero, and lays both out over the ranks."""
        outputs = Scores(has_head=False, pad_token_id=self._pad_token_id)
        self._start_training(ModelSpec.trained(self._config.model, outputs, self._seed))

    @register(dispatch_mode=ENGINE_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """As `RewardModelWorker.compute_rm_score`, with the weights as they are now."""
        return _rm_scores(self._engine, data, self._micro_batch_rows)

    @register(dispatch_mode=ENGINE_COMPUTE_METRIC)
    def update_reward_model(self, data: DataProto) -> list[dict[str, float]]:
        """Trains on the pairs; returns the metrics of each optimizer step, the same on every rank."""
        return self._update(data)


def _rm_scores(engine: TrainEngine, data: DataProto, rows: int) -> DataProto:
    tensors = tensors_of(data)
    scores = take_last_token(engine.infer(tensors, rows)["scores"], tensors["response_mask"])
    return DataProto.from_dict({"rm_scores": place_on_last_token(scores, tensors["response_mask"])})
