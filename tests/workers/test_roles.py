"""Actor, critic, reference and rollout in one process a rank, through the groups that a driver holds."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from podium.protocol import (
    Backend,
    ClassWithInitArgs,
    DataProto,
    ResourcePool,
    WorkerError,
    WorkerGroup,
    create_colocated_worker_cls,
)
from podium.trainer.config.rollout import RolloutConfig
from podium.trainer.config.shared import ModelConfig, OptimConfig
from podium.trainer.config.training import ActorConfig, CriticConfig, RefConfig
from podium.trainer.ppo.objectives import PolicyObjective, ValueObjective
from podium.utils.errors import UserError
from podium.workers.actor import ActorWorker
from podium.workers.critic import CriticWorker
from podium.workers.reference import ReferenceWorker
from podium.workers.rollout.worker import RolloutWorker
from podium.workers.weight_sync.groups import connect_groups, sync_groups
from podium.workers.weight_sync.transport.base import SyncSettings
from tests.models.tiny import EOS, PAD, VOCABULARY, plain_logits, row_tokens, tiny_model
from tests.workers.conftest import ENV

P, R = 5, 8
TEMPERATURE = 0.8
INPUTS = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
Groups = dict[str, WorkerGroup]
Start = Callable[..., Groups]


def roles(path: str, rollout: str, ranks: int, *, mini_rows: int = 8) -> dict[str, ClassWithInitArgs]:
    """`mini_rows` over all ranks."""
    optim = OptimConfig(lr=2e-3, eps=1e-4)
    actor = ActorConfig(optim=optim, use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
    critic = CriticConfig(optim=optim)
    model = ModelConfig(path=path)
    rows: dict[str, Any] = {
        "mini_batch_rows": -(-mini_rows // ranks),
        "micro_batch_rows": 2,
        "epochs": 1,
        "total_steps": 9,
    }
    return {
        "actor": ClassWithInitArgs(
            ActorWorker,
            model,
            actor,
            PolicyObjective.from_config(actor),
            temperature=TEMPERATURE,
            entropy_grad=True,
            infer_rows=3,
            **rows,
        ),
        "critic": ClassWithInitArgs(CriticWorker, path, critic, ValueObjective(critic), **rows),
        "ref": ClassWithInitArgs(ReferenceWorker, model, "fsdp", RefConfig(), temperature=TEMPERATURE, infer_rows=4),
        "rollout": ClassWithInitArgs(
            RolloutWorker,
            path,
            RolloutConfig(name=rollout, max_num_seqs=4),
            max_prompt_length=P,
            max_response_length=R,
            pad_token_id=PAD,
            stop_token_ids=(EOS,),
        ),
    }


@pytest.fixture(scope="module")
def start(local_backend: Backend, model_dirs: dict[str, str]) -> Iterator[Start]:
    """Groups by role on 1 or 2 ranks, with models as they were on disk and weights synced as version 0."""
    started: dict[tuple[str, int], Any] = {}

    def groups(rollout: str, ranks: int) -> Groups:
        specs = roles(model_dirs["qwen2"], rollout, ranks)
        if (rollout, ranks) not in started:
            started[rollout, ranks] = local_backend.start_group(
                ResourcePool([ranks]), create_colocated_worker_cls(specs), env=ENV, timeout_s=120
            )
        spawned = started[rollout, ranks].spawn(list(specs))
        for group in spawned.values():
            group.init_model()
        connect_groups([spawned["actor"]], "colocated", SyncSettings())
        sync_groups([spawned["actor"]], 0)
        return spawned

    yield groups
    for group in started.values():
        group.shutdown()


def prompts(rows: int, **meta: Any) -> DataProto:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, P + 1, (rows, 1), generator=g)
    mask = torch.arange(P) >= P - lengths
    ids = torch.where(mask, torch.randint(3, VOCABULARY, (rows, P), generator=g), PAD)
    sampling = {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": -1}
    return DataProto.from_dict(
        {"prompts": ids, "prompt_mask": mask, "seeds": torch.arange(rows) + 100},
        meta_info={"sampling": sampling, "min_version": 0, **meta},
    )


def forward_inputs(batch: DataProto) -> DataProto:
    return batch.select(INPUTS, [], [])


def one_iteration(groups: Groups, rows: int) -> tuple[DataProto, list[dict[str, float]], list[dict[str, float]]]:
    """What a driver does: generate, log-probs, values, update, sync. Returns the batch and both updates' metrics."""
    batch = groups["rollout"].generate_sequences(prompts(rows))
    inputs = forward_inputs(batch)
    for answer in (
        groups["actor"].compute_log_prob(inputs),
        groups["ref"].compute_ref_log_prob(inputs),
        groups["critic"].compute_values(inputs),
    ):
        batch = batch.union(answer)
    g = torch.Generator().manual_seed(1)
    extra = {name: torch.randn(rows, R, generator=g) for name in ("advantages", "returns")}
    batch = batch.union(DataProto.from_dict(extra))
    critic = groups["critic"].update_critic(batch)
    actor = groups["actor"].update_actor(batch)
    for answers in (critic, actor):
        assert all(answer == answers[0] for answer in answers), "the same on every rank"
    sync_groups([groups["actor"]], 1)
    return batch, critic[0], actor[0]


def check_batch(batch: DataProto, rows: int) -> None:
    """Every column against a plain forward of the model on disk."""
    tensors = dict(batch.batch.items())
    assert set(tensors) >= {*INPUTS, "rollout_log_probs"} and "dispatch_valid" not in tensors
    assert all(len(value) == rows for value in tensors.values())
    model = tiny_model("qwen2")
    original = prompts(rows).batch
    for row in range(rows):
        prompt, response = row_tokens(tensors, row)
        assert prompt == original["prompts"][row][original["prompt_mask"][row]].tolist()
        assert EOS not in response[:-1] and (len(response) == R or response[-1] == EOS)
        assert (tensors["responses"][row, len(response) :] == PAD).all()
        assert tensors["response_mask"][row].tolist() == [t < len(response) for t in range(R)]
        logits = plain_logits(model, prompt + response)[len(prompt) - 1 : -1] / TEMPERATURE
        log_p = torch.log_softmax(logits, dim=-1)
        expected = log_p[torch.arange(len(response)), torch.tensor(response)]
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
        for name, column in (
            ("rollout_log_probs", expected),
            ("old_log_probs", expected),
            ("ref_log_prob", expected),
            ("entropys", entropy),
            ("values", torch.zeros(len(response))),
        ):
            torch.testing.assert_close(tensors[name][row, : len(response)], column, rtol=0, atol=1e-4)
            assert not tensors[name][row, len(response) :].any(), name


def exported(groups: Groups, path: Path) -> dict[str, torch.Tensor]:
    groups["actor"].save_hf(str(path))
    return dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())


CASES = [("hf", 1), ("hf", 2), ("vllm", 1), pytest.param("vllm", 2, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("rollout", "ranks"), CASES)
def test_an_iteration_through_the_groups(start: Start, tmp_path: Path, rollout: str, ranks: int):
    groups = start(rollout, ranks)
    batch, critic, actor = one_iteration(groups, 8)
    check_batch(batch, 8)
    assert len(critic) == len(actor) == 1
    assert actor[0]["actor/ratio_dev_max"] == pytest.approx(0.0, abs=1e-5), "old log-probs are of this very policy"
    assert critic[0]["grad_norm"] > 0 and actor[0]["grad_norm"] > 0
    trained = tiny_model("qwen2")
    trained.load_state_dict(exported(groups, tmp_path))
    again = groups["rollout"].generate_sequences(prompts(8, min_version=1))
    tensors = dict(again.batch.items())
    for row in range(8):
        prompt, response = row_tokens(tensors, row)
        log_p = torch.log_softmax(plain_logits(trained, prompt + response)[len(prompt) - 1 : -1] / TEMPERATURE, dim=-1)
        expected = log_p[torch.arange(len(response)), torch.tensor(response)]
        torch.testing.assert_close(tensors["rollout_log_probs"][row, : len(response)], expected, rtol=0, atol=1e-4)
    with pytest.raises(WorkerError, match="StaleWeightsError: generation asked for weights of version 2 or newer"):
        groups["rollout"].generate_sequences(prompts(8, min_version=2))


@pytest.mark.parametrize(("rollout", "ranks"), CASES)
def test_responses_that_are_given_as_they_finish_are_the_same(start: Start, rollout: str, ranks: int):
    """Of 7 rows: on 2 ranks one fills a shard and does not come back. Twice, the first time given up halfway."""
    group = start(rollout, ranks)["rollout"]
    request = prompts(7)
    whole = group.generate_sequences(request)
    request = request.union(DataProto.from_dict({"rows": torch.arange(7) + 20}))
    group.begin_sequences(request)
    group.finished_sequences(1)
    group.begin_sequences(request)
    parts, left, calls = [], [7], 0
    while any(left):
        answers = group.finished_sequences(2)
        parts += [part for part, _ in answers if part is not None]
        left, calls = [unfinished for _, unfinished in answers], calls + 1
    streamed = DataProto.concat(parts)
    assert calls > 1, "all came at once"
    streamed = streamed.select_idxs(streamed.batch["rows"].argsort())
    assert streamed.batch["rows"].tolist() == list(range(20, 27))
    assert streamed.meta_info == whole.meta_info
    for name, column in whole.batch.items():
        torch.testing.assert_close(streamed.batch[name], column, rtol=0, atol=1e-5)


def test_an_uneven_batch_gives_what_one_rank_gives(start: Start, tmp_path: Path):
    """7 rows on 2 ranks: the row that fills a shard reaches neither results nor losses nor metrics."""
    batches, metrics, weights = [], [], []
    for ranks in (1, 2):
        groups = start("hf", ranks)
        batch, critic, actor = one_iteration(groups, 7)
        batches.append(batch)
        metrics.append({**critic[0], **{f"actor {name}": value for name, value in actor[0].items()}})
        weights.append(exported(groups, tmp_path / str(ranks)))
    check_batch(batches[1], 7)
    for name in ("responses", "response_mask", "input_ids", "position_ids"):
        assert torch.equal(batches[0].batch[name], batches[1].batch[name])
    # Counts of micro-batches are the one thing that depends on how rows are spread.
    spread = {name for name in metrics[0] if name.endswith("all_masked_micro_batches")}
    assert {k: v for k, v in metrics[1].items() if k not in spread} == pytest.approx(
        {k: v for k, v in metrics[0].items() if k not in spread}, rel=1e-3, abs=1e-5
    )
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=2e-6)


def test_a_checkpoint_of_two_ranks_goes_on_with_one(start: Start, tmp_path: Path):
    two = start("hf", 2)
    one_iteration(two, 8)
    for role in ("actor", "critic"):
        two[role].save_checkpoint(str(tmp_path / role))
    one = start("hf", 1)
    for role in ("actor", "critic"):
        one[role].load_checkpoint(str(tmp_path / role))
    saved, resumed = exported(two, tmp_path / "a"), exported(one, tmp_path / "b")
    torch.testing.assert_close(resumed, saved, rtol=0, atol=0)
    sync_groups([one["actor"]], 1)
    batches = [groups["rollout"].generate_sequences(prompts(8, min_version=1)) for groups in (one, two)]
    assert torch.equal(batches[0].batch["responses"], batches[1].batch["responses"])
    values = [groups["critic"].compute_values(forward_inputs(batches[0])).batch["values"] for groups in (one, two)]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-5)
    assert values[0].abs().max() > 1e-4


def test_names_of_engines_are_checked(local_backend: Backend, model_dirs: dict[str, str]):
    specs = roles(model_dirs["llama"], "trt", 1)
    specs["actor"].args[1].strategy = "deepspeed"
    group = local_backend.start_group(ResourcePool([1]), create_colocated_worker_cls(specs), env=ENV)
    spawned = group.spawn(["actor", "rollout"])
    with pytest.raises(UserError, match="strategy=deepspeed: the training engines are fsdp and megatron"):
        spawned["actor"].init_model()
    with pytest.raises(UserError, match=r"rollout\.name=trt: expected vllm or hf"):
        spawned["rollout"].init_model()
    group.shutdown()
