"""``podium export`` and ``podium replay`` on what runs leave."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.commands import PPO, Preloaded
from tests.e2e.test_resume import ACTOR, finished, refused, tensor_data
from tests.small_task import SmallTask

WAYS = [
    ("fsdp", 1, {}),
    pytest.param("fsdp", 2, {}, marks=pytest.mark.slow),
    pytest.param("megatron", 2, {f"{ACTOR}megatron__tensor_model_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param("megatron", 2, {f"{ACTOR}megatron__pipeline_model_parallel_size": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "ranks", "layout"), WAYS)
def test_a_checkpoint_becomes_an_ordinary_directory(
    command: Preloaded, task: SmallTask, tmp_path: Path, strategy: str, ranks: int, layout: dict[str, int]
):
    run_dir = tmp_path / "run"
    changes = {
        f"{ACTOR}strategy": strategy,
        "critic__strategy": strategy,
        "critic__optim__lr": 1e-2,
        "trainer__n_gpus_per_node": ranks,
        "trainer__total_training_steps": 2,
        "trainer__save_freq": 1,
        **layout,
    }
    finished(command(PPO, task.ppo(run_dir, **changes)))
    result = command("podium", ["export", str(run_dir), str(tmp_path / "out"), "--check"])
    finished(result)
    assert "check: at most" in result.out
    ours, theirs = (folder / "model.safetensors" for folder in (tmp_path / "out", run_dir / "export"))
    assert tensor_data(ours) == tensor_data(theirs), "the run's own export"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tied = model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tied == model.config.tie_word_embeddings
    assert (tmp_path / "out" / "generation_config.json").is_file()
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("12=").input_ids

    argv = ["export", str(run_dir / "global_step_2"), str(tmp_path / "critic"), "--role", "critic", "--check"]
    finished(command("podium", argv))
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic").score.weight.abs().max() > 0

    result = command("podium", ["replay", str(run_dir), "--step", "2"])
    if ranks == 1:
        finished(result)
        assert "replay of step 2: every metric equal" in result.out

    refused(command("podium", ["export", str(run_dir), str(tmp_path / "out")]), "is not empty")
    refused(command("podium", ["export", str(run_dir), str(tmp_path / "x"), "--role", "judge"]), "has actor, critic")
    refused(command("podium", ["export", str(tmp_path), str(tmp_path / "x")]), "is no checkpoint")
