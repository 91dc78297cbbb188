"""Layouts from sizes alone: they are what the engines make, and plans between any two of them are right and cheap."""

import dataclasses
import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from podium.models.megatron.parallel import MegatronLayout
from podium.utils.errors import UserError
from podium.workers.weight_sync.boxes import itemsize, volume
from podium.workers.weight_sync.cost import held_bytes, plan_cost
from podium.workers.weight_sync.layouts import FSDPShards, Layout, MegatronShards, RolloutShards, rollout_ranks
from podium.workers.weight_sync.parameters import ModelShape
from podium.workers.weight_sync.plan import Holders, ReshardPlan
from tests.workers.weight_sync.plan_checks import Pieces, pieces_of, run

SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "dtype": "bfloat16",
}
EXPERTS = {"num_experts": 6, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
FAMILIES = {
    "llama": {},
    "llama, all biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma": {},
    "mixtral": {"num_local_experts": 6},
    "qwen3_moe": EXPERTS,
}


def shape_of(name: str, **changes) -> ModelShape:
    return ModelShape.from_config({**SMALL, "model_type": name, **FAMILIES[name], **changes})


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_the_model(name):
    import torch

    config = {**SMALL, "model_type": name, **FAMILIES[name]}
    hf_config = AutoConfig.for_model(**{k: v for k, v in config.items() if k != "dtype"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    ours = list(ModelShape.from_config(config).parameters())
    assert sum(p.numel for p in ours) == sum(p.numel() for p in model.parameters())
    # In memory, transformers fuses a layer's experts; and Mixtral's block has its checkpoint's name on disk only.
    theirs = {n: tuple(p.shape) for n, p in model.named_parameters() if ".experts." not in n}
    named = {p.name.replace("block_sparse_moe", "mlp"): p.shape for p in ours if p.expert is None}
    assert named == theirs
    assert ModelShape.from_config({**hf_config.to_dict(), "dtype": "bfloat16"}) == ModelShape.from_config(config)


def test_configs_that_are_not_known_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"model_type='gpt2': expected one of llama, "):
        ModelShape.from_config({**SMALL, "model_type": "gpt2"})
    with pytest.raises(UserError, match=r"hidden_size=None: expected a whole number"):
        ModelShape.from_config({**SMALL, "model_type": "llama", "hidden_size": None})
    with pytest.raises(UserError, match=r"config.json does not open \(No such file"):
        ModelShape.load(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not JSON"):
        ModelShape.load(str(tmp_path))


# Which sizes each model can be split into: its heads are 12 over 4 kv heads, its experts 6.
TRAIN = st.builds(
    lambda tp, pp, vpp, cp, ep: MegatronLayout(tp, pp, vpp if pp > 1 else 1, cp, ep),
    st.sampled_from([1, 2, 4, 12]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3]),
)
ROLLOUT_TP = st.sampled_from([1, 2, 4])  # the padded vocabulary, 128, divides by it


@st.composite
def changes(draw, most_ranks: int) -> tuple[Layout, RolloutShards]:
    """A trainer's layout and a rollout's, on the same ranks or on others."""
    model = shape_of(draw(st.sampled_from(["llama", "qwen2", "qwen3_moe"])))  # plain, tied, experts
    if draw(st.booleans()):
        layout = draw(TRAIN)
        assume(layout.stages <= model.layers)
        if not model.experts:
            layout = dataclasses.replace(layout, ep=1)
        if layout.stages == 2 and draw(st.booleans()):
            layout = dataclasses.replace(layout, stage_layers=(1, 3))
        dp = draw(st.integers(1, max(1, most_ranks // layout.model_ranks)))
        assume((layout.tp * layout.cp * dp) % (layout.ep * layout.expert_tp) == 0)
        train: Layout = MegatronShards(model, layout, dp)
    else:
        train = FSDPShards(model, draw(st.integers(1, most_ranks)))
    tp = draw(ROLLOUT_TP)
    shared = train.world_size % tp == 0 and draw(st.booleans())
    dp = train.world_size // tp if shared else draw(st.integers(1, max(1, most_ranks // tp)))
    eps = [ep for ep in (tp, 2 * tp, 3 * tp) if ep > 1 and (tp * dp) % ep == 0] if model.experts else []
    ep = draw(st.sampled_from([1, *eps]))
    ranks = rollout_ranks(train, tp, dp, ep) if shared else train.world_size + np.arange(tp * dp).reshape(dp, tp)
    return train, RolloutShards(model, ranks, ep)


@settings(deadline=None, max_examples=30)
@given(changes(most_ranks=12))
def test_every_change_of_a_small_world_brings_the_right_elements(change):
    train, rollout = change
    sources, destinations = train.table(), rollout.table()
    shapes = {parameter.name: parameter.shape for parameter in train.model.parameters()}
    plan = ReshardPlan(sources, destinations)
    run(plan, pieces_of(sources), pieces_of(destinations), shapes)
    written_out = ReshardPlan.from_pieces(pieces_of(sources), pieces_of(destinations))
    for rank in pieces_of(destinations):
        sizes = [sum(m.numel for m in p.receives(rank)) for p in (plan, written_out)]
        assert sizes[0] == sizes[1]


@settings(deadline=None, max_examples=10)
@given(changes(most_ranks=4096), st.data())
def test_a_rank_of_a_large_world_gets_each_element_once_from_one_that_has_it(change, data):
    train, rollout = change
    sources, destinations = train.table(), rollout.table()
    plan = ReshardPlan(sources, destinations)
    rank = int(data.draw(st.sampled_from(np.unique(rollout.ranks).tolist())))
    received: dict[str, list] = defaultdict(list)
    messages = plan.receives(rank)
    for message in messages[:3]:
        assert message in plan.sends(message.source), "the sender has another view of it"
    assert all(message.source != rank for message in messages)
    for message in messages + plan.local(rank):
        for transfer in message.transfers:
            span = transfer.starts, transfer.stops
            received[transfer.name].append(span)
            assert _holds(sources[transfer.name], message.source, span)
            assert _holds(destinations[transfer.name], rank, span)
    for name, holders in destinations.items():
        wanted = sum(volume(s) for s, ranks in zip(holders.spans, holders.ranks, strict=True) if rank in ranks)
        assert sum(volume(span) for span in received[name]) == wanted
        for one, other in itertools.combinations(received[name], 2):
            assert any(max(a, c) >= min(b, d) for a, b, c, d in zip(*one, *other, strict=True))


def _holds(holders: Holders, rank: int, span) -> bool:
    """Whether one box of the rank contains `span`."""
    return any(
        rank in ranks and all(a >= c and b <= d for a, b, c, d in zip(*span, *held, strict=True))
        for held, ranks in zip(holders.spans, holders.ranks, strict=True)
    )


@settings(deadline=None, max_examples=25)
@given(changes(most_ranks=4096))
def test_only_what_is_missing_travels_and_replicas_share_it(change):
    train, rollout = change
    sources, destinations = train.table(), rollout.table()
    plan = ReshardPlan(sources, destinations)
    kept = np.zeros(1 + int(rollout.ranks.max()), dtype=np.int64)
    for stream in plan.local_streams:
        kept[stream.destinations] += sum(flow.nbytes * len(flow.names) for flow in stream.flows)
    received, sent = np.zeros_like(kept), np.zeros(train.world_size, dtype=np.int64)
    for stream in plan.streams:
        received[stream.destinations] += stream.width
        sent[stream.sources] += stream.sent
    assert (received + kept == held_bytes(destinations)).all()
    assert sent.sum() == received.sum()
    # Ranks that hold the same are asked for as much, to within a row of each stream.
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, boxes in _boxes_by_rank(sources, train.world_size).items():
        alike[boxes].append(rank)
    row = max(math.prod(parameter.shape[1:]) for parameter in train.model.parameters()) * 2
    for ranks in alike.values():
        assert np.ptp(sent[ranks]) <= row * (1 + len(plan.streams))


def _boxes_by_rank(table: dict[str, Holders], size: int) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {rank: [] for rank in range(size)}
    boxes = itertools.count()
    for holders in {id(holders): holders for holders in table.values()}.values():
        for ranks in holders.ranks:
            number = next(boxes)
            for rank in ranks.tolist():
                found[rank].append(number)
    return {rank: tuple(numbers) for rank, numbers in found.items()}


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4, 8]),
)
def test_zero_redundancy_where_the_layouts_nest(tp, pp, vpp, dp, rollout_tp):
    """HybridFlow (arXiv 2409.19256), table 2: volume (tp - t_g p_g) / (t_g p_g tp) M and peak M / (t_g p_g) a rank."""
    assume(tp % rollout_tp == 0 and tp * pp * dp <= 4096)
    model = ModelShape.from_config(
        {**SMALL, "model_type": "llama", "vocab_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "hidden_size": 64}
    )
    train = MegatronShards(model, MegatronLayout(tp, pp, vpp if pp > 1 else 1), dp)
    rollout = RolloutShards(model, rollout_ranks(train, rollout_tp, train.world_size // rollout_tp))
    # Norms lie whole on every rank of both: the paper counts what is split.
    split = {parameter.name for parameter in model.parameters() if parameter.cut != "whole"}
    sources = {name: holders for name, holders in train.table().items() if name in split}
    destinations = {name: holders for name, holders in rollout.table().items() if name in split}
    size = sum(parameter.numel for parameter in model.parameters() if parameter.name in split) * 2
    cost = plan_cost(ReshardPlan(sources, destinations), sources, destinations)
    assert cost.peak == size // rollout_tp
    assert math.isclose(cost.received.mean, (tp * pp - rollout_tp) / (rollout_tp * tp * pp) * size)
    # Each rank lacks exactly what it does not train with; the outer stages have the vocabulary, and lack less.
    missing = held_bytes(destinations) - held_bytes(sources)
    assert (cost.received.min, cost.received.max) == (missing.min(), missing.max())
    # Each destination meets one rank of each other stage and of each neighbour whose slice it lacks, and no more.
    assert cost.messages <= train.world_size * (tp * pp // rollout_tp - 1) + train.world_size * (dp > 1)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "rollout_tp"),
    [(2, 2, 2, 1), (4, 2, 1, 2), (2, 4, 1, 4), (2, 2, 2, 8), (8, 1, 1, 4), (2, 1, 3, 3), (3, 2, 1, 2)],
)
def test_no_other_placement_of_the_rollout_keeps_more(tp, pp, dp, rollout_tp):
    """Against every assignment of parts to ranks, by brute force."""
    heads = {"num_attention_heads": 24, "num_key_value_heads": 24, "vocab_size": 24 * 64, "num_hidden_layers": 6}
    if pp == 4:
        heads["num_hidden_layers"] = 8
    model = shape_of("llama", **heads)
    train = MegatronShards(model, MegatronLayout(tp, pp), dp)
    number = train.world_size
    parts = rollout_ranks(train, rollout_tp, number // rollout_tp)
    assert sorted(parts.reshape(-1).tolist()) == list(range(number))
    sources = train.table()
    kept = np.zeros((number, rollout_tp), dtype=np.int64)
    engine = RolloutShards(model, np.arange(rollout_tp)[None]).table()
    for part in range(rollout_tp):  # what each rank would keep as this part
        everyone = {}
        for name, holders in engine.items():
            spans = tuple(span for span, ranks in zip(holders.spans, holders.ranks, strict=True) if part in ranks)
            everyone[name] = Holders(holders.dtype, spans, (np.arange(number),) * len(spans))
        for stream in ReshardPlan(sources, everyone).local_streams:
            kept[stream.destinations, part] += sum(flow.nbytes * len(flow.names) for flow in stream.flows)
    best = _best_assignment(kept)
    ours = sum(int(kept[rank, part]) for part in range(rollout_tp) for rank in parts[:, part].tolist())
    assert ours == best


def _best_assignment(kept: np.ndarray) -> int:
    """Most that ranks can keep where as many become each part, over the ranks one by one."""
    number, parts = kept.shape
    best = {(number // parts,) * parts: 0}
    for rank in range(number):
        after: dict[tuple[int, ...], int] = {}
        for left, total in best.items():
            for part in range(parts):
                if left[part]:
                    key = (*left[:part], left[part] - 1, *left[part + 1 :])
                    after[key] = max(after.get(key, 0), total + int(kept[rank, part]))
        best = after
    return best[(0,) * parts]


def test_generation_groups_are_strided_through_those_of_training():
    """The example of the paper's figure 8: training 1-4-2, generation 1-2-2-2."""
    train = MegatronShards(shape_of("llama"), MegatronLayout(tp=4), dp=2)
    assert rollout_ranks(train, 2, 4).tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    # Generation over more ranks than training: neighbours share out the parts of their slice.
    train = MegatronShards(shape_of("llama"), MegatronLayout(tp=2, pp=2), dp=2)
    assert rollout_ranks(train, 4, 2).tolist() == [[0, 2, 1, 3], [4, 6, 5, 7]]
    assert rollout_ranks(FSDPShards(shape_of("llama"), 4), 2, 2).tolist() == [[0, 1], [2, 3]]


def test_experts_decide_where_they_are_spread_in_both():
    model = shape_of("qwen3_moe", num_experts=8)
    train = MegatronShards(model, MegatronLayout(tp=1, ep=4), dp=8)
    rollout = RolloutShards(model, rollout_ranks(train, 2, 4, ep=4), ep=4)
    experts = {p.name for p in model.parameters() if p.expert is not None}
    sources = {name: holders for name, holders in train.table().items() if name in experts}
    destinations = {name: holders for name, holders in rollout.table().items() if name in experts}
    assert not ReshardPlan(sources, destinations).streams, "every rank trains the experts that it generates with"


def test_fsdp_rows_are_those_of_torch_chunk():
    import torch

    model = shape_of("llama")
    for world in (1, 3, 5, 7, 64, 200):
        pieces: Pieces = pieces_of(FSDPShards(model, world).table())
        for parameter in model.parameters():
            chunks = torch.arange(parameter.shape[0]).chunk(world)
            expected = {(rank, int(chunk[0]), int(chunk[-1]) + 1) for rank, chunk in enumerate(chunks)}
            held = {
                (r, b.starts[0], b.stops[0]) for r, boxes in pieces.items() for b in boxes if b.name == parameter.name
            }
            assert held == expected


def test_sizes_that_do_not_go_together_are_named():
    model = shape_of("llama")
    with pytest.raises(UserError, match=r"heads of model.layers.0.self_attn.q_proj.weight: 12 does not divide by 5"):
        RolloutShards(shape_of("llama", vocab_size=640), np.arange(5).reshape(1, 5)).table()
    with pytest.raises(UserError, match="the padded vocabulary: 128 does not divide by 3"):
        RolloutShards(model, np.arange(3).reshape(1, 3)).table()
    with pytest.raises(UserError, match="ep=2 has no effect: the model has no experts"):
        RolloutShards(model, np.arange(2).reshape(1, 2), ep=2)
    with pytest.raises(UserError, match="expected a multiple of tp=2 that divides the 4 ranks"):
        RolloutShards(shape_of("qwen3_moe"), np.arange(4).reshape(2, 2), ep=3)
    with pytest.raises(UserError, match="attention heads: 12 does not divide by 8"):
        MegatronShards(model, MegatronLayout(tp=8), 1)
    with pytest.raises(UserError, match="tp=3: 4 kv heads neither divide by it nor divide it"):
        MegatronShards(model, MegatronLayout(tp=3), 1)
    with pytest.raises(UserError, match="experts: 6 does not divide by 4"):
        MegatronShards(shape_of("qwen3_moe"), MegatronLayout(ep=4), 4)


def test_bytes_are_counted_by_dtype():
    model = shape_of("llama")
    whole = sum(parameter.numel for parameter in model.parameters())
    assert held_bytes(FSDPShards(model, 3).table()).sum() == whole * itemsize("bfloat16")
