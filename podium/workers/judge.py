"""The generative reward model: a rollout of its own, whose weights stay as they are."""

from podium.protocol import Dispatch, register
from podium.workers.rollout.worker import RolloutWorker


class JudgeWorker(RolloutWorker):
    """Answers questions about responses."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine and fills it with the weights at the model's path."""
        super().init_model()
        self.load_own_weights()
