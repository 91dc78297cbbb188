"""Which rows come next: what every order has, and several sources mixed by weight."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from podium.utils.errors import UserError


class Sampler(ABC):
    """An endless iterator of ``(epoch, row indices)``, epoch counting from 0.

    A curriculum is a subclass of one's own (`data.sampler`), made as ``cls(dataset, batch_size, seed)``: `update` tells
    it how its rows fared, and what it learns from that belongs into `state_dict`.
    """

    @abstractmethod
    def __next__(self) -> tuple[int, np.ndarray]:
        """The next batch's rows."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the position after the last batch handed out."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""

    def update(self, batch: Any) -> None:  # noqa: B027 - most orders learn nothing
        """Called with every batch (`DataProto`) once it is scored, before the next is asked for.

        Its ``index`` says which row of the files each response belongs to, ``sequence_scores`` how it was scored.
        """

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        return self


class MixtureLoader(Sampler):
    """Batches in which each source has its share, each source in an order of its own, begun anew when it ends.

    At any time a source has given its share of all rows, to within a row or two. Its rows come in an order that depends
    on `seed`, the source and how often it was gone through, so how many each has given is the whole position. The epoch
    is rows drawn over rows there are.

    Args:
        sources: row indices of each source.
        weights: of each source, above 0; they need not add up to 1.

    Raises:
        UserError: not one positive weight for each source, or a source without rows.
    """

    def __init__(
        self, sources: Sequence[np.ndarray], weights: Sequence[float], batch_size: int, seed: int, shuffle: bool
    ):
        if len(weights) != len(sources) or not all(weight > 0 for weight in weights):
            raise UserError(
                f"data.train_weights={list(weights)}: expected a number above 0 for each of the {len(sources)} "
                "entries of data.train_files"
            )
        for source, rows in enumerate(sources):
            if len(rows) == 0:
                raise UserError(f"entry {source} of data.train_files has no rows left to be mixed in")
        self._sources = [np.asarray(rows) for rows in sources]
        self._shares = np.asarray(weights, dtype=np.float64) / sum(weights)
        self._batch, self._seed, self._shuffle = batch_size, seed, shuffle
        self._drawn = [0] * len(sources)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # of each source's current epoch

    def __next__(self) -> tuple[int, np.ndarray]:
        epoch = sum(self._drawn) // sum(map(len, self._sources))
        rows = []
        for _ in range(self._batch):
            behind = self._shares * (sum(self._drawn) + 1) - self._drawn
            source = int(np.argmax(behind))
            rows.append(self._row(source, self._drawn[source]))
            self._drawn[source] += 1
        order = np.random.default_rng([self._seed, sum(self._drawn)]).permutation(len(rows))
        return epoch, np.array(rows)[order] if self._shuffle else np.array(rows)

    def _row(self, source: int, number: int) -> int:
        rows = self._sources[source]
        epoch, position = divmod(number, len(rows))
        if not self._shuffle:
            return int(rows[position])
        if source not in self._orders or self._orders[source][0] != epoch:
            order = np.random.default_rng([self._seed, source, epoch]).permutation(len(rows))
            self._orders[source] = (epoch, order)
        return int(rows[self._orders[source][1][position]])

    def state_dict(self) -> dict[str, Any]:
        """How many rows each source has given, and what they are rows of."""
        return {
            "drawn": list(self._drawn),
            "lengths": [len(rows) for rows in self._sources],
            "shares": self._shares.tolist(),
            "batch_size": self._batch,
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken.

        Raises:
            UserError: other sources, shares, batch size or seed: the position would mean other rows.
        """
        mine = self.state_dict()
        for name in ("lengths", "shares", "batch_size", "seed"):
            if state[name] != mine[name]:
                raise UserError(f"cannot resume the data order: {name} was {state[name]} and is now {mine[name]}")
        self._drawn = list(state["drawn"])
