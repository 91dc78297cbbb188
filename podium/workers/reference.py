"""The reference: the policy as it was before training, which the KL holds the actor to."""

from typing import Any

from podium.protocol import DataProto, Dispatch, register
from podium.workers.engine.spec import LogProbs, ModelSpec
from podium.workers.training import ENGINE_COMPUTE_PROTO, EngineRole, tensors_of


class ReferenceWorker(EngineRole):
    """Log-probs of a frozen causal language model.

    Args:
        model: has ``path``, ``trust_remote_code``.
        strategy: name of the engine.
        config: has the section of that engine.
        temperature: of sampling, as for the actor.
        infer_rows: sequences in one forward.
    """

    def __init__(self, model: Any, strategy: str, config: Any, *, temperature: float, infer_rows: int):
        super().__init__()
        self._model, self._strategy, self._config = model, strategy, config
        self._temperature, self._infer_rows = temperature, infer_rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model and lays it out over the ranks."""
        model = ModelSpec(self._model.path, LogProbs(self._temperature), self._model.trust_remote_code)
        self._start(self._strategy, self._config, model)

    @register(dispatch_mode=ENGINE_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """``ref_log_prob`` (B, R)."""
        outputs = self._engine.infer(tensors_of(data), self._infer_rows)
        return DataProto.from_dict({"ref_log_prob": outputs["log_probs"]})
