"""What a change of layout costs, beside the two ways that need no plan."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from podium.workers.weight_sync.boxes import itemsize, volume
from podium.workers.weight_sync.parameters import Parameter
from podium.workers.weight_sync.plan import Holders, ReshardPlan

Table = Mapping[str, Holders]


@dataclass(frozen=True)
class Spread:
    """Bytes over the ranks of a group."""

    min: int
    mean: float
    max: int

    @classmethod
    def of(cls, values: np.ndarray) -> "Spread":
        return cls(int(values.min()), float(values.mean()), int(values.max()))


@dataclass(frozen=True)
class Cost:
    """One way of bringing the weights over."""

    received: Spread
    """By each rank of the rollout, from others."""
    sent: Spread | None
    """By each rank of the trainer. None for collectives, in which every rank may pass on what it got."""
    peak: int
    """Bytes of weights on the fullest rank of the rollout while they come in, without the trainer's own and buffers."""
    messages: int
    """Pairs of ranks with a message, or collectives, of the whole sync."""

    def seconds(self, bandwidth: float) -> float:
        """Least time where each rank sends and receives `bandwidth` bytes a second at once: the busiest rank's."""
        return max(self.received.max, self.sent.max if self.sent else 0) / bandwidth


def plan_cost(plan: ReshardPlan, sources: Table, destinations: Table) -> Cost:
    """Counts what a plan moves, made from the same two tables."""
    held, wanted = held_bytes(sources), held_bytes(destinations)
    received, sent = np.zeros_like(wanted), np.zeros_like(held)
    pairs = np.zeros((len(held), len(wanted)), dtype=bool)
    for stream in plan.streams:
        received[stream.destinations] += stream.width
        sent[stream.sources] += stream.sent
        pairs[stream.pairs()] = True
    return Cost(
        Spread.of(received[wanted > 0]), Spread.of(sent[held > 0]), int(wanted.max()), int(np.count_nonzero(pairs))
    )


def gather_cost(parameters: Sequence[Parameter], sources: Table, destinations: Table) -> Cost:
    """Every rank of the rollout gathers the whole model, one collective a parameter, and cuts its part out of it."""
    held, wanted = held_bytes(sources), held_bytes(destinations)
    ranks = np.flatnonzero(wanted)
    own = np.where(ranks < len(held), held[np.minimum(ranks, len(held) - 1)], 0)
    whole = sum(_bytes(parameter, destinations) for parameter in parameters)
    return Cost(Spread.of(whole - own), None, whole, len(parameters))


def broadcast_cost(parameters: Sequence[Parameter], destinations: Table) -> Cost:
    """Every parameter is put together on a rank and broadcast whole to all engines, which keep their part of it."""
    whole = [_bytes(parameter, destinations) for parameter in parameters]
    received = Spread(sum(whole), sum(whole), sum(whole))
    return Cost(received, None, int(held_bytes(destinations).max()) + max(whole), len(parameters))


def held_bytes(table: Table) -> np.ndarray:
    """Bytes on each rank, by number; ranks that do not take part have 0."""
    counts = Counter(id(holders) for holders in table.values())
    alike = {id(holders): holders for holders in table.values()}
    size = 1 + max(int(ranks[-1]) for holders in alike.values() for ranks in holders.ranks)
    total = np.zeros(size, dtype=np.int64)
    for key, holders in alike.items():
        for span, ranks in zip(holders.spans, holders.ranks, strict=True):
            total[ranks] += counts[key] * volume(span) * itemsize(holders.dtype)
    return total


def _bytes(parameter: Parameter, table: Table) -> int:
    return parameter.numel * itemsize(table[parameter.name].dtype)
