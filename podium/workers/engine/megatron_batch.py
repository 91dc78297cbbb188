"""Rows of a batch as a Megatron model takes them, and its output as the (b, R) outputs of every engine."""

from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

from podium.models.megatron.context import local_positions
from podium.models.megatron.parallel import MegatronLayout
from podium.utils.device import device
from podium.workers.engine.base import Tensors
from podium.workers.engine.megatron_logits import (
    VocabularyShard,
    entropies,
    log_normalizers,
    log_probs,
    sums_pi_squared,
)
from podium.workers.engine.spec import LogProbs, Outputs, Scores, Values


@dataclass(frozen=True)
class MicroBatch:
    """Some rows, without the padding before and between prompt and response.

    Tokens are (b, s / cp): a row's tokens from its start, then padding up to s, of which each context-parallel rank
    has its part. Packed, they are (1, t / cp): the rows one after the other. Padding comes after the tokens, so the
    causal mask hides it.

    It is laid out on the host and moved as a whole: nothing later has to wait for the device to know a length.
    """

    rows: Tensors
    """The rows as they came, for the loss."""
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    places: torch.Tensor
    """Where among the flattened tokens the n are that have an output."""
    following: torch.Tensor
    """The token after each of them, (n,)."""
    slots: torch.Tensor
    """Where in the flattened (b, R) outputs theirs go, (n,)."""
    packed: PackedSeqParams | None
    """With lengths on the host, where attention and rotary embeddings read them in every layer."""
    counts: bool = True
    """False for a copy that only fills the schedule up."""


def micro_batches(batch: Tensors, size: int, kind: Outputs, layout: MegatronLayout, pack: bool) -> list[MicroBatch]:
    """Consecutive slices of `size` rows (the last may be shorter), on this rank's device, in their own lengths.

    Interleaved stages take micro-batches of one shape, in groups of the pipeline's size: rows of one padding token and
    more padding fill up the smaller ones, and copies of a row, which do not count, the last group.

    Args:
        batch: on the host.
    """
    rows = len(batch["input_ids"])
    slices = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
    fillers = -len(slices) % layout.pp if layout.vpp > 1 else 0
    slices += [slice(0, 1)] * fillers
    parts = [{name: value[part] for name, value in batch.items()} for part in slices]
    spans = [_Spans.of(part, layout, pack) for part in parts]
    if layout.vpp > 1:
        spans = _same_shape(spans, pack)
    made = [_lay_out(part, span, kind, layout, pack) for part, span in zip(parts, spans, strict=True)]
    counted = len(made) - fillers
    return made[:counted] + [replace(micro, counts=False) for micro in made[counted:]]


def outputs_of(micro: MicroBatch, output: torch.Tensor, kind: Outputs) -> Tensors:
    """(b, R) float32, 0 where there is no response token, alike on every tp and cp rank of the last stage.

    Args:
        output: of the model, logits (b, s / cp, V / tp) or values (b, s / cp, 1).
    """
    picked = output.flatten(0, 1).index_select(0, micro.places)
    if isinstance(kind, LogProbs):
        fields = _distribution(picked, micro.following, kind)
    else:
        fields = {name: picked[:, 0].float() for name in output_names(kind)}
    shape = micro.rows["responses"].shape
    empty = torch.zeros(shape.numel(), dtype=torch.float32, device=output.device)
    group = parallel_state.get_context_parallel_group()
    return {
        # Each context-parallel rank has some of the tokens; their sum has all.
        name: reduce_from_tensor_model_parallel_region(empty.scatter(0, micro.slots, values), group=group).view(shape)
        for name, values in fields.items()
    }


def output_names(kind: Outputs) -> list[str]:
    """Names of the outputs without gradients."""
    if isinstance(kind, Values):
        return ["values"]
    if isinstance(kind, Scores):
        return ["scores"]
    return ["log_probs", "entropy", *(["sum_pi_squared"] if kind.sum_pi_squared else [])]


def _distribution(logits: torch.Tensor, labels: torch.Tensor, kind: LogProbs) -> Tensors:
    """What is asked of the distributions, (n,) each, from logits (n, V / tp)."""
    if kind.temperature != 1.0:
        logits = logits / kind.temperature
    rank = parallel_state.get_tensor_model_parallel_rank()
    shard = VocabularyShard(parallel_state.get_tensor_model_parallel_group(), rank * logits.shape[-1])
    normalizers = log_normalizers(logits, shard)
    fields = {"log_probs": log_probs(logits, labels, normalizers, shard)}
    with torch.set_grad_enabled(kind.entropy_grad and torch.is_grad_enabled()):
        fields["entropy"] = entropies(logits, normalizers, shard)
    if kind.sum_pi_squared and not torch.is_grad_enabled():
        fields["sum_pi_squared"] = sums_pi_squared(logits, normalizers, shard)
    return fields


@dataclass(frozen=True)
class _Spans:
    """Where the tokens of rows stand, and the widths that they get; (b,) int64 each."""

    first: torch.Tensor
    """Column of a row's first token."""
    length: torch.Tensor
    """Tokens of prompt and response."""
    width: torch.Tensor
    """Tokens and padding."""

    @classmethod
    def of(cls, rows: Tensors, layout: MegatronLayout, pack: bool) -> "_Spans":
        mask = rows["attention_mask"].bool()
        prompt_width = mask.shape[1] - rows["responses"].shape[1]
        # A row without a prompt keeps one padding token: something has to predict its first token.
        first = torch.where(mask.any(dim=1), mask.int().argmax(dim=1), prompt_width).clamp(max=prompt_width - 1)
        length = prompt_width + mask[:, prompt_width:].sum(dim=1) - first
        piece = 2 * layout.cp if layout.cp > 1 else 1
        multiple = piece * (layout.tp if layout.sequence_parallel else 1)
        if pack:
            width = _up(length, piece)
            width[-1] += _up(width.sum(), multiple) - width.sum()
        else:
            width = _up(length.max(), multiple).expand(len(length))
        return cls(first, length, width)


def _same_shape(spans: list[_Spans], pack: bool) -> list[_Spans]:
    """Widened, and with rows added, so that all have one shape."""
    if pack:
        total = max(int(span.width.sum()) for span in spans)
        last = [torch.arange(len(span.width)) == len(span.width) - 1 for span in spans]
        return [
            replace(span, width=span.width + is_last * (total - span.width.sum()))
            for span, is_last in zip(spans, last, strict=True)
        ]
    width, rows = max(int(span.width.max()) for span in spans), max(len(span.width) for span in spans)
    return [
        _Spans(
            torch.nn.functional.pad(span.first, (0, rows - len(span.first))),
            torch.nn.functional.pad(span.length, (0, rows - len(span.length))),
            span.width.new_full((rows,), width),
        )
        for span in spans
    ]


def _lay_out(rows: Tensors, spans: _Spans, kind: Outputs, layout: MegatronLayout, pack: bool) -> MicroBatch:
    ids, response_width = rows["input_ids"], rows["responses"].shape[1]
    ids = torch.nn.functional.pad(ids, (0, 0, 0, len(spans.width) - len(ids)))
    prompt_width = ids.shape[1] - response_width
    place = torch.arange(int(spans.width.max()))
    column = spans.first[:, None] + place
    inside = place < spans.length[:, None]
    # A score is of the sequence up to its token; everything else is told by the token before.
    ahead = 0 if isinstance(kind, Scores) else 1
    answer = column + ahead - prompt_width
    is_answer = (answer >= 0) & (place + ahead < spans.length[:, None])
    row = torch.arange(len(ids))[:, None]
    last = ids.shape[1] - 1
    fields = {
        "input_ids": torch.where(inside, ids.gather(1, column.clamp(max=last)), 0),
        "position_ids": place.expand_as(column),
        "following": ids.gather(1, (column + 1).clamp(max=last)),
        "slots": torch.where(is_answer, row * response_width + answer, -1),
    }
    fields, packed = _spread(fields, spans.width, layout, pack)
    slots = fields["slots"].flatten()
    places = (slots >= 0).nonzero().flatten()
    return MicroBatch(
        {name: value.to(device()) for name, value in rows.items()},
        fields["input_ids"].to(device()),
        fields["position_ids"].to(device()),
        places.to(device()),
        fields["following"].flatten()[places].to(device()),
        slots[places].to(device()),
        packed,
    )


def _spread(
    fields: Tensors, widths: torch.Tensor, layout: MegatronLayout, pack: bool
) -> tuple[Tensors, PackedSeqParams | None]:
    """Packs rows if asked to, and takes this context-parallel rank's part."""
    packed, bounds = None, [0, int(widths.max())]
    if pack:
        ends = torch.nn.functional.pad(widths.cumsum(0), (1, 0)).int()
        bounds, longest = ends.tolist(), int(widths.max())
        packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
        kept = torch.arange(longest) < widths[:, None]
        fields = {name: value[kept][None] for name, value in fields.items()}
    if layout.cp > 1:
        part = local_positions(bounds, layout.cp, parallel_state.get_context_parallel_rank())
        fields = {name: value[:, part] for name, value in fields.items()}
    return fields, packed


def _up(values: torch.Tensor, multiple: int) -> torch.Tensor:
    """Rounded up to a multiple."""
    return (values + multiple - 1) // multiple * multiple
