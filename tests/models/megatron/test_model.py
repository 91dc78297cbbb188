"""Megatron models against Hugging Face's: the outputs of each row, and the weights there and back."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from podium.models.megatron.parallel import MegatronLayout
from podium.models.value_head import ValueModel
from podium.protocol import WorkerGroup
from podium.utils.errors import UserError
from tests.models.megatron.conftest import Ranks
from tests.models.tiny import VOCABULARY, plain_logits, save_tiny, tiny_model

if TYPE_CHECKING:
    from tests.models.megatron.hosts import Part

LAYERS = 4
DENSE = ("llama", "llama_tied", "qwen2", "qwen3")
LIKE_THEM = ("mistral", "gemma")
EXPERTS = ("qwen3_moe", "mixtral")
Layout = MegatronLayout

QUICK = [
    (1, Layout()),
    (2, Layout(tp=2, sequence_parallel=True)),
    (2, Layout(pp=2, vpp=2)),
    (2, Layout(cp=2)),
]
SLOW = [
    (2, Layout(tp=2)),
    (2, Layout(pp=2)),
    (2, Layout(pp=2, stage_layers=(1, 3))),
    (2, Layout()),
    (4, Layout(tp=2)),
    (4, Layout(tp=4)),
    (4, Layout(pp=4)),
    (4, Layout(tp=2, pp=2)),
    (4, Layout(tp=2, pp=2, vpp=2, sequence_parallel=True)),
    (4, Layout(tp=2, cp=2)),
    (4, Layout(pp=2, cp=2)),
]
# With experts, tensor parallel needs sequence parallel.
SLOW_EXPERTS = [
    (1, Layout()),
    (2, Layout()),
    (2, Layout(pp=2)),
    (2, Layout(cp=2)),
    (2, Layout(tp=2, sequence_parallel=True)),
    (2, Layout(tp=2, ep=2, sequence_parallel=True)),
    (4, Layout(ep=2)),
    (4, Layout(ep=4)),
    (4, Layout(pp=2, ep=2)),
    (4, Layout(tp=2, ep=2, sequence_parallel=True)),
    (4, Layout(tp=2, pp=2, vpp=2, ep=2, sequence_parallel=True)),
]


def cases(layouts: list[tuple[int, Layout]]) -> list[Any]:
    return [pytest.param(number, layout, id=f"{layout} on {number}") for number, layout in layouts]


@pytest.fixture(scope="session")
def rows() -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    return [
        torch.randint(2, VOCABULARY, (int(n),), generator=g).tolist() for n in torch.randint(3, 17, (8,), generator=g)
    ]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("megatron")
    return {name: save_tiny(name, root / name, num_hidden_layers=LAYERS) for name in DENSE + LIKE_THEM + EXPERTS}


def assemble(parts_by_rank: "list[list[Part]]", rows: list[list[int]]) -> list[torch.Tensor]:
    """Whole outputs (L, V) of each row. Every position must come from exactly one rank."""
    like = next(output for parts in parts_by_rank for _, _, output in parts)
    whole = [like.new_full((len(row), like.shape[-1]), torch.nan) for row in rows]
    for parts in parts_by_rank:
        for row, positions, output in parts:
            assert whole[row][positions].isnan().all(), "two ranks tell of the same position"
            whole[row][positions] = output
    return whole


def equals_hugging_face(group: WorkerGroup, layout: Layout, name: str, path: str, rows: list[list[int]]) -> None:
    model = tiny_model(name, num_hidden_layers=LAYERS)
    group.build(path, layout)
    for packed in (False, True):
        got = assemble(group.outputs(rows, packed, 2), rows)
        for row, logits in zip(rows, got, strict=True):
            torch.testing.assert_close(logits[:, :VOCABULARY], plain_logits(model, row), rtol=0, atol=1e-4)
            assert (logits[:, VOCABULARY:] < -1e8).all(), "rows that round the vocabulary up have probability 0"
    kept = load_file(Path(path) / "model.safetensors")
    for weights in group.weights():
        assert weights.keys() == kept.keys()
        assert all(torch.equal(weights[key], kept[key]) for key in kept)


@pytest.mark.parametrize(("number", "layout"), cases(QUICK))
@pytest.mark.parametrize("name", ["llama_tied", "qwen2"])
def test_a_model_equals_hugging_face(ranks: Ranks, number: int, layout: Layout, name: str, saved, rows):
    equals_hugging_face(ranks(number), layout, name, saved[name], rows)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "layout"), cases(QUICK))
@pytest.mark.parametrize("name", LIKE_THEM)
def test_other_architectures_equal_hugging_face(ranks: Ranks, number: int, layout: Layout, name: str, saved, rows):
    equals_hugging_face(ranks(number), layout, name, saved[name], rows)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "layout"), cases(QUICK + SLOW))
@pytest.mark.parametrize("name", DENSE)
def test_every_layout_of_every_architecture_equals_hugging_face(
    ranks: Ranks, number: int, layout: Layout, name: str, saved, rows
):
    equals_hugging_face(ranks(number), layout, name, saved[name], rows)


def test_experts_on_two_ranks_equal_hugging_face(ranks: Ranks, saved, rows):
    equals_hugging_face(ranks(2), Layout(ep=2), "qwen3_moe", saved["qwen3_moe"], rows)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "layout"), cases(SLOW_EXPERTS))
@pytest.mark.parametrize("name", EXPERTS)
def test_every_layout_of_experts_equals_hugging_face(ranks: Ranks, number: int, layout: Layout, name: str, saved, rows):
    equals_hugging_face(ranks(number), layout, name, saved[name], rows)


@pytest.fixture(scope="session")
def value_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A trained value model's directory, and the model."""
    torch.manual_seed(3)
    model = ValueModel(tiny_model("qwen2", num_hidden_layers=LAYERS).model)
    torch.nn.init.normal_(model.score.weight)
    path = tmp_path_factory.mktemp("value")
    model.config.save_pretrained(path)
    save_file(model.state_dict(), path / "model.safetensors")
    return str(path), model


@pytest.mark.parametrize(
    ("number", "layout"), cases([(1, Layout()), (2, Layout(tp=2, sequence_parallel=True)), (2, Layout(pp=2))])
)
def test_values_equal_hugging_face(ranks: Ranks, number: int, layout: Layout, value_model, rows):
    path, model = value_model
    ranks(number).build(path, layout, value_head=True)
    for packed in (False, True):
        for row, values in zip(rows, assemble(ranks(number).outputs(rows, packed, 4), rows), strict=True):
            with torch.no_grad():
                expected = model(torch.tensor([row]), None, torch.arange(len(row))[None])[0]
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-4)
    weights, kept = ranks(number).weights()[-1], model.state_dict()
    assert weights.keys() == kept.keys()
    assert all(torch.equal(weights[key], kept[key]) for key in kept)


def test_a_new_value_model_says_zero(ranks: Ranks, saved, rows):
    ranks(1).build(saved["llama_tied"], Layout(), value_head=True)
    assert not any(values.any() for values in assemble(ranks(1).outputs(rows, False, 4), rows))


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, vpp=2), Layout(pp=2, stage_layers=(1, 3))], ids=str)
def test_a_stage_takes_up_where_the_one_before_ends(ranks: Ranks, layout: Layout, saved, rows):
    """Each chunk alone, given Hugging Face's hidden states by set_input_tensor."""
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    with torch.no_grad():
        result = model(torch.tensor([rows[0]]), output_hidden_states=True)
    hidden = [state[0] for state in result.hidden_states]  # the last has the final norm's
    ranks(2).build(saved["llama"], layout)
    facts = sorted((f for rank in ranks(2).stages(rows[0], hidden) for f in rank), key=lambda f: f["layers"])
    split = layout.layers_by_stage(LAYERS)
    assert [len(f["layers"]) for f in facts] == list(split)
    assert [number for f in facts for number in f["layers"]] == list(range(LAYERS))
    expected_ranks = [(stage % 2, stage // 2 if layout.vpp > 1 else None) for stage in range(layout.stages)]
    assert [f["stage"] for f in facts] == expected_ranks
    for f in facts[:-1]:
        torch.testing.assert_close(f["output"], hidden[f["layers"][-1] + 1], rtol=0, atol=1e-5)
    torch.testing.assert_close(facts[-1]["output"], result.logits[0], rtol=0, atol=1e-4)
    inner = [f["names"] for f in facts[1:-1]]
    assert facts[0]["names"] == ["embedding.word_embeddings.weight"] and not any(inner)
    assert facts[-1]["names"] == ["decoder.final_layernorm.weight", "output_layer.weight"]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma", "qwen3_moe"])
def test_gradients_equal_hugging_face(ranks: Ranks, name: str, recompute: bool, saved, rows):
    """Of padded rows, so that a padding token that reached another would show."""
    weight = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2)) / VOCABULARY
    ranks(1).build(saved[name], Layout(), recompute=recompute)
    (got,) = ranks(1).gradients(rows, weight)
    model = tiny_model(name, num_hidden_layers=LAYERS).train()
    sum((model(torch.tensor([row])).logits[0] * weight).sum() for row in rows).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if "experts" not in name}
    for key, gradient in expected.items():
        torch.testing.assert_close(got[key], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


def test_tokens_that_no_expert_normalises(ranks: Ranks, tmp_path: Path, rows):
    path = save_tiny("qwen3_moe", tmp_path, norm_topk_prob=False)
    model = tiny_model("qwen3_moe", norm_topk_prob=False)
    ranks(1).build(path, Layout())
    for row, logits in zip(rows, assemble(ranks(1).outputs(rows, True, 4), rows), strict=True):
        torch.testing.assert_close(logits, plain_logits(model, row), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rotations_equal_hugging_face(ranks: Ranks, kind: str, tmp_path: Path, rows):
    rope = {
        **{"rope_type": kind, "rope_theta": 1e3, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 16,
    }
    path = save_tiny("llama", tmp_path, rope_parameters=rope)
    model = tiny_model("llama", rope_parameters=rope)
    ranks(1).build(path, Layout())
    for row, logits in zip(rows, assemble(ranks(1).outputs(rows, False, 4), rows), strict=True):
        torch.testing.assert_close(logits, plain_logits(model, row), rtol=0, atol=1e-4)


def test_roles_of_one_process_share_one_layout(ranks: Ranks, saved):
    ranks(2).build(saved["llama"], Layout(tp=2))
    ranks(2).build_beside(saved["qwen2"], Layout(tp=2))
    with pytest.raises(UserError, match=r"share one Megatron layout, and this process has \(tp2\): asked for \(pp2\)"):
        ranks(2).build_beside(saved["qwen2"], Layout(pp=2))


def test_bfloat16_stays_close(ranks: Ranks, saved, rows):
    ranks(1).build(saved["qwen3"], Layout(), dtype=torch.bfloat16)
    model = tiny_model("qwen3", num_hidden_layers=LAYERS).bfloat16()
    for row, logits in zip(rows, assemble(ranks(1).outputs(rows, True, 4), rows), strict=True):
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(logits.float(), plain_logits(model, row), rtol=0, atol=0.15)
    exported = ranks(1).weights("bfloat16")[0]
    assert all(torch.equal(exported[name], p) for name, p in model.named_parameters())


def test_parameters_lie_in_one_flat_buffer_and_training_keeps_them_in_one(ranks: Ranks, saved):
    """Also where interleaving gives a rank several chunks, and in bfloat16, where master weights lie elsewhere."""
    ranks(2).build(saved["qwen2"], Layout(pp=2, vpp=2), dtype=torch.bfloat16)
    for rank in ranks(2).train_a_step():
        for chunk in rank:
            assert chunk["before"]["buffers"] == chunk["after"]["buffers"] == 1
            assert chunk["before"]["aligned"] and chunk["changed"]
            assert chunk["pieces are of the buffer"]
