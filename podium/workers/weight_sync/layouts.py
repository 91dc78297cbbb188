"""Who holds which part of each parameter under Megatron, FSDP and an inference engine, from sizes alone."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator

import numpy as np

from podium.models.megatron.parallel import MegatronLayout
from podium.utils.errors import UserError
from podium.workers.weight_sync.boxes import Span
from podium.workers.weight_sync.parameters import ModelShape, Parameter
from podium.workers.weight_sync.plan import Holders

# vLLM rounds the vocabulary up to this before it splits it (DEFAULT_VOCAB_PADDING_SIZE).
_ROLLOUT_VOCAB_MULTIPLE = 64


class Layout(ABC):
    """Where the parameters of a model lie."""

    world_size: int
    """Ranks that hold the model."""

    def __init__(self, model: ModelShape):
        self.model = model
        self._known: dict[Hashable, Holders] = {}

    def table(self) -> dict[str, Holders]:
        """Who holds what of each parameter; those that are held alike share one object."""
        return {parameter.name: self.holders(parameter) for parameter in self.model.parameters()}

    def holders(self, parameter: Parameter) -> Holders:
        """Who holds what of one parameter.

        Raises:
            UserError: a size of the model does not divide as the layout asks.
        """
        key = parameter.cut, parameter.shape, self._group(parameter)
        if key not in self._known:
            spans, ranks = zip(*self._shards(parameter), strict=True)
            self._known[key] = Holders(self.model.dtype, spans, ranks)
        return self._known[key]

    @abstractmethod
    def _group(self, parameter: Parameter) -> Hashable:
        """Equal for two parameters of the same shape and cut that the same ranks hold alike."""

    @abstractmethod
    def _shards(self, parameter: Parameter) -> Iterator[tuple[Span, np.ndarray]]:
        """Boxes that are not empty, and the ranks, ascending, that hold them."""

    def slices(self) -> tuple[np.ndarray, int]:
        """By rank, which of how many equal slices of the model's layers it holds (of those layers that it holds)."""
        return np.zeros(self.world_size, dtype=np.int64), 1


class FSDPShards(Layout):
    """FSDP over all ranks: rows of every parameter, cut as ``torch.chunk`` cuts them, so that late ranks may have none.

    A layer's experts are one parameter, a row an expert (as in transformers 5), so that each expert is whole on a rank.
    """

    def __init__(self, model: ModelShape, world_size: int):
        super().__init__(model)
        self.world_size = world_size

    def _group(self, parameter: Parameter) -> Hashable:
        return None if parameter.expert is None else self._rank_of(parameter.expert)

    def _rank_of(self, expert: int) -> int:
        return expert // -(-self.model.experts // self.world_size)

    def _shards(self, parameter: Parameter) -> Iterator[tuple[Span, np.ndarray]]:
        if parameter.expert is not None:
            yield _whole(parameter), np.array([self._rank_of(parameter.expert)])
            return
        rows = parameter.shape[0]
        size = -(-rows // self.world_size)
        for rank, start in enumerate(range(0, rows, size)):
            yield _range(parameter, 0, start, min(start + size, rows)), np.array([rank])


class MegatronShards(Layout):
    """Megatron-core's layout; ranks count tensor, context, data and pipeline parallel, the first fastest."""

    def __init__(self, model: ModelShape, layout: MegatronLayout, dp: int):
        super().__init__(model)
        self.layout = layout
        self.world_size = layout.model_ranks * dp
        layout.dp(self.world_size)
        self._ranks_a_stage = self.world_size // layout.pp
        self._stage = np.repeat(np.arange(layout.stages), layout.layers_by_stage(model.layers))
        _part("attention heads", model.heads, layout.tp)
        if model.kv_heads % layout.tp and layout.tp % model.kv_heads:
            raise UserError(f"tp={layout.tp}: {model.kv_heads} kv heads neither divide by it nor divide it")
        if layout.ep > 1:
            if not model.experts:
                raise UserError(f"ep={layout.ep} has no effect: the model has no experts")
            _part("experts", model.experts, layout.ep)

    def _group(self, parameter: Parameter) -> Hashable:
        return self._pipeline_ranks(parameter), self._expert_rank(parameter)

    def _pipeline_ranks(self, parameter: Parameter) -> tuple[int, ...]:
        last = self.layout.pp - 1
        if parameter.layer is not None:
            return (int(self._stage[parameter.layer]) % self.layout.pp,)
        if parameter.name != "model.embed_tokens.weight":
            return (last,)
        return (0, last) if self.model.tied and last else (0,)

    def _expert_rank(self, parameter: Parameter) -> int | None:
        return None if parameter.expert is None else parameter.expert // (self.model.experts // self.layout.ep)

    def _shards(self, parameter: Parameter) -> Iterator[tuple[Span, np.ndarray]]:
        expert = self._expert_rank(parameter)
        parts = self.layout.tp if expert is None else self.layout.expert_tp
        within = np.arange(self._ranks_a_stage)
        if expert is not None:  # where ep > 1, an expert is whole and its ranks are every ep-th of the stage's
            within = within[within // parts % self.layout.ep == expert]
        stages = np.array(self._pipeline_ranks(parameter))[:, None] * self._ranks_a_stage
        if parameter.cut == "whole":
            yield _whole(parameter), (stages + within).reshape(-1)
            return
        for part in range(parts):
            ranks = (stages + within[within % parts == part]).reshape(-1)
            for span in self._spans(parameter, part, parts):
                yield span, ranks

    def _spans(self, parameter: Parameter, part: int, parts: int) -> Iterator[Span]:
        rows = parameter.shape[0]
        if parameter.cut in ("q", "k", "v"):
            for start, stop in self._head_rows(parameter.cut, part, parts):
                yield _range(parameter, 0, start, stop)
        elif parameter.cut == "vocabulary":
            size = -(-rows // parts)
            if part * size < rows:
                yield _range(parameter, 0, part * size, min((part + 1) * size, rows))
        else:
            yield _even(parameter, part, parts)

    def _head_rows(self, cut: str, part: int, parts: int) -> Iterator[tuple[int, int]]:
        """Rows of q, k or v in a rank's equal part of the fused matrix: for each kv head its q's, then k, then v.

        With fewer kv heads than ranks the part ends inside a group: some ranks then have no k or v at all.
        """
        groups, width = self.model.kv_heads, self.model.head_dim
        queries = _part("attention heads", self.model.heads, groups) * width
        total = groups * (queries + 2 * width)
        size = _part("rows of the fused qkv", total, parts)
        offset, each = {"q": (0, queries), "k": (queries, width), "v": (queries + width, width)}[cut]
        found: list[tuple[int, int]] = []
        for group in range(groups):
            begin = group * (queries + 2 * width) + offset
            low, high = max(begin, part * size), min(begin + each, (part + 1) * size)
            if low < high:
                shift = group * each - begin
                if found and found[-1][1] == low + shift:
                    found[-1] = found[-1][0], high + shift
                else:
                    found.append((low + shift, high + shift))
        yield from found

    def slices(self) -> tuple[np.ndarray, int]:
        within = np.arange(self.world_size) % self._ranks_a_stage
        return within % self.layout.tp, self.layout.tp

    def expert_slices(self) -> tuple[np.ndarray, int]:
        """By rank, which of how many equal shares of the experts it holds."""
        within = np.arange(self.world_size) % self._ranks_a_stage
        return within // self.layout.expert_tp % self.layout.ep, self.layout.ep


class RolloutShards(Layout):
    """An inference engine's layout, which is vLLM's: `dp` copies, each over `tp` ranks, experts whole where `ep` > 1.

    Args:
        ranks: (dp, tp), the rank of each engine's each part; `rollout_ranks` makes the one that moves least.
        ep: ranks over which the experts are spread, whole tensor-parallel groups together. 1: they are cut like
            other matrices.
    """

    def __init__(self, model: ModelShape, ranks: np.ndarray, ep: int = 1):
        super().__init__(model)
        self.ranks, self.ep = ranks, ep
        self.world_size = ranks.size
        self._tp = ranks.shape[1]
        if ep > 1:
            if not model.experts:
                raise UserError(f"--rollout ep={ep} has no effect: the model has no experts")
            if ep % self._tp or ranks.size % ep:
                raise UserError(
                    f"--rollout ep={ep}: expected a multiple of tp={self._tp} that divides the {ranks.size} ranks"
                )

    def _group(self, parameter: Parameter) -> Hashable:
        return None if parameter.expert is None or self.ep == 1 else self._expert_rank(parameter.expert)

    def _expert_rank(self, expert: int) -> int:
        """Experts in order, as many to each rank, one more to the first ones where they do not divide."""
        base, more = divmod(self.model.experts, self.ep)
        return expert // (base + 1) if expert < more * (base + 1) else more + (expert - more * (base + 1)) // base

    def _shards(self, parameter: Parameter) -> Iterator[tuple[Span, np.ndarray]]:
        if parameter.expert is not None and self.ep > 1:
            yield _whole(parameter), np.sort(self.ranks.reshape(-1, self.ep)[:, self._expert_rank(parameter.expert)])
        elif parameter.cut == "whole":
            yield _whole(parameter), np.sort(self.ranks.reshape(-1))
        elif parameter.cut in ("k", "v") and self._tp > self.model.kv_heads:
            copies = _part("tensor-parallel ranks", self._tp, self.model.kv_heads)
            for head in range(self.model.kv_heads):
                ranks = self.ranks[:, head * copies : (head + 1) * copies]
                yield _even(parameter, head, self.model.kv_heads), np.sort(ranks.reshape(-1))
        else:
            for part in range(self._tp):
                yield from ((span, np.sort(self.ranks[:, part])) for span in self._spans(parameter, part))

    def _spans(self, parameter: Parameter, part: int) -> Iterator[Span]:
        if parameter.cut == "vocabulary":
            rows = parameter.shape[0]
            padded = -(-rows // _ROLLOUT_VOCAB_MULTIPLE) * _ROLLOUT_VOCAB_MULTIPLE
            size = _part("the padded vocabulary", padded, self._tp)
            if part * size < rows:
                yield _range(parameter, 0, part * size, min((part + 1) * size, rows))
            return
        if parameter.cut in ("q", "k", "v"):
            _part(f"heads of {parameter.name}", parameter.shape[0] // self.model.head_dim, self._tp)
        yield _even(parameter, part, self._tp)


def rollout_ranks(train: Layout, tp: int, dp: int, ep: int = 1) -> np.ndarray:
    """Which rank of `train` is which part of which engine, so that it keeps as much as can be. Returns (dp, tp).

    Tensor-parallel groups of generation are strided through those of training, as in the HybridFlow paper (arXiv
    2409.19256, section 5.3): training's tensor rank r of t becomes generation's r // (t / t_g), so that what a rank
    trains with is a part of what it generates with. The t / t_g neighbours that hold one part, and the stages of the
    pipeline, serve different engines. Where generation has more parts than training, neighbours share out the parts of
    their slice. (Where neither count divides the other, parts go to ranks in the order of their slices: close to the
    best, which would depend on the stages.) Experts that are spread in both decide, being most of a model's weights.
    """
    assert tp * dp == train.world_size
    parts, (slices, count) = tp, train.slices()
    if ep > 1 and isinstance(train, MegatronShards) and train.layout.ep > 1:
        parts, (slices, count) = ep, train.expert_slices()
    coarse = int(np.gcd(count, parts))
    ranks = np.empty((train.world_size // parts, parts), dtype=np.int64)
    for index in range(coarse):
        members = np.flatnonzero(slices // (count // coarse) == index)
        columns = parts // coarse
        if count == coarse:  # any part of the slice will do: engines of neighbouring ranks
            block = members.reshape(-1, columns)
        else:  # in the order of the slices
            ordered = members[np.argsort(slices[members], kind="stable")] if columns > 1 else members
            block = ordered.reshape(columns, -1).T
        ranks[:, index * columns : (index + 1) * columns] = block
    return ranks.reshape(dp, tp)


def _whole(parameter: Parameter) -> Span:
    return (0,) * len(parameter.shape), parameter.shape


def _range(parameter: Parameter, axis: int, start: int, stop: int) -> Span:
    starts, stops = [0] * len(parameter.shape), list(parameter.shape)
    starts[axis], stops[axis] = start, stop
    return tuple(starts), tuple(stops)


def _even(parameter: Parameter, part: int, parts: int) -> Span:
    axis = 1 if parameter.cut == "columns" else 0
    size = _part(f"{parameter.name} of shape {parameter.shape}, dimension {axis},", parameter.shape[axis], parts)
    return _range(parameter, axis, part * size, (part + 1) * size)


def _part(what: str, size: int, parts: int) -> int:
    if size % parts:
        raise UserError(f"{what}: {size} does not divide by {parts}")
    return size // parts
