"""Loading: what it reads, what it takes, and what it says of a directory that lacks something."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from podium.models.megatron.parallel import MegatronLayout
from podium.models.megatron.weights import Checkpoint
from podium.utils.errors import UserError
from tests.models.megatron.conftest import Ranks
from tests.models.tiny import save_tiny, tiny_model

Layout = MegatronLayout


def test_a_sharded_checkpoint_loads_like_a_single_file(ranks: Ranks, tmp_path: Path):
    single, sharded = save_tiny("llama", tmp_path / "single"), tmp_path / "sharded"
    tiny_model("llama").save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3 and not (sharded / "model.safetensors").exists()
    kept = load_file(Path(single) / "model.safetensors")
    ranks(2).build(str(sharded), Layout(tp=2))
    weights = ranks(2).weights()[1]
    assert weights.keys() == kept.keys() and all(torch.equal(weights[name], kept[name]) for name in kept)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_in_one_tensor_load_like_experts_each(ranks: Ranks, name: str, tmp_path: Path):
    path = save_tiny(name, tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    fused = tiny_model(name).state_dict()
    assert any(key.endswith("experts.gate_up_proj") for key in fused)
    save_file(fused, tmp_path / "model.safetensors")
    ranks(2).build(path, Layout(ep=2))
    weights = ranks(2).weights()[0]
    assert weights.keys() == kept.keys() and all(torch.equal(weights[key], kept[key]) for key in kept)


def test_a_vocabulary_of_odd_size_is_rounded_up_with_zeros(ranks: Ranks, tmp_path: Path):
    path = save_tiny("qwen2", tmp_path)
    ranks(2).build(path, Layout(tp=2))
    first, second = ranks(2).parameter("embedding.word_embeddings.weight")
    embeddings = tiny_model("qwen2").model.embed_tokens.weight
    assert torch.equal(torch.cat([first, second])[:-1], embeddings) and not second[-1].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            "the weight model.layers.1.mlp.up_proj.weight",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(65)}),
            r"model.norm.weight has shape \[65\], and config.json makes it \[64\]",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.zeros(128, 64)}),
            r"lm_head.weight has shape \[128, 64\], and config.json makes it \[101, 64\]",
        ),
    ],
)
def test_a_checkpoint_that_is_not_the_configs_is_refused(ranks: Ranks, change, message: str, tmp_path: Path):
    path = save_tiny("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        ranks(1).build(path, Layout())


def test_a_directory_without_safetensors_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="strategy=megatron reads safetensors, and there is neither"):
        Checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(UserError, match=r"model.safetensors: does not open as safetensors"):
        Checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "missing.safetensors"}}))
    with pytest.raises(UserError, match=r"missing.safetensors: does not open as safetensors"):
        Checkpoint(str(tmp_path)).read("a", ((0,), (1,)), (1,))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout()], ids=str)
def test_a_rank_never_holds_much_more_than_its_shard(ranks: Ranks, layout: Layout, tmp_path: Path):
    sizes = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 16}
    model = tiny_model("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=64, **sizes)
    largest = max(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path)
    del model
    ranks(2).build(save_tiny("llama", tmp_path / "small"), layout)  # what a process needs for any model
    for rank, memory in enumerate(ranks(2).measure_load(str(tmp_path), layout)):
        shard, growth = memory["shard"], memory["growth"]
        print(
            f"{layout} rank {rank}: shard {shard / 1e6:.0f} MB, growth {growth / 1e6:.0f} MB = {growth / shard:.2f} x"
        )
        assert growth <= 1.2 * shard + largest
