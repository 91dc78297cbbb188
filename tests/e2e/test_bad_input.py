"""Bad input: one clear line, exit code 2, soon, and no process left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.commands import PPO, SFT, Preloaded, Result, run
from tests.small_task import SmallTask

MODEL = "actor_rollout_ref__model__path"
ROLLOUT = "actor_rollout_ref__rollout__name"
ACTOR = "actor_rollout_ref__actor__"


def check(result: Result, *parts: str, workers_started: bool = False) -> None:
    """One error line with all of `parts`, exit code 2, nothing left; before any worker unless said otherwise."""
    assert result.code == 2, str(result)
    assert len(result.error_lines) == 1, str(result)
    for part in parts:
        assert part in result.error_lines[0], result.error_lines[0]
    assert "Traceback" not in result.err, str(result)
    assert not result.left
    if not workers_started:
        assert "step 0" not in result.out and "step 1" not in result.out, str(result)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, task: SmallTask) -> dict[str, Path]:
    """Files and folders with something wrong."""
    folder = tmp_path_factory.mktemp("bad")
    rows = pq.read_table(task.train).to_pylist()
    tables = {
        "empty": pq.read_table(task.train).slice(0, 0),
        "no_prompt": pq.read_table(task.train).drop_columns(["prompt"]),
        "long": pa.Table.from_pylist([{**row, "prompt": row["prompt"] * 3} for row in rows]),
    }
    paths = {name: folder / f"{name}.parquet" for name in tables}
    for name, table in tables.items():
        pq.write_table(table, paths[name])
    programs = {
        "raises": "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1 / 0\n",
        "none": "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return None\n",
        "signature": "def compute_score(text):\n    return 1.0\n",
        "other_name": "def compute_scores(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n",
        "syntax": "def compute_score(:\n",
        # Right on the trial row (its own ground truth), wrong on what the policy writes.
        "raises_later": (
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            "    if solution_str != ground_truth:\n        raise KeyError('no\\nsuch key')\n    return 1.0\n"
        ),
    }
    for name, text in programs.items():
        paths[name] = folder / f"{name}.py"
        paths[name].write_text(text)
    paths["text"] = folder / "data.txt"
    paths["text"].write_text("hello")
    paths["no_config"] = folder / "no_config"
    paths["no_config"].mkdir()
    paths["no_tokenizer"] = folder / "no_tokenizer"
    paths["no_tokenizer"].mkdir()
    shutil.copy(task.model / "config.json", paths["no_tokenizer"])
    return paths


BEFORE_IMPORTS = {
    "unknown key": (["data.train_batchsize=4"], ["data.train_batchsize", "did you mean data.train_batch_size?"]),
    "wrong type": (["data.train_batch_size=many"], ["data.train_batch_size", "takes int", "many"]),
    "not a list": (["trainer.logger=5"], ["trainer.logger", "takes list"]),
    "null where a number is needed": (["trainer.nnodes=null"], ["trainer.nnodes", "takes int"]),
    "not key=value": (["data.train_files"], ["data.train_files", "key=value"]),
    "unknown environment variable": (
        ["trainer.default_local_dir=${oc.env:PODIUM_NOT_SET}/x"],
        ["trainer.default_local_dir", "PODIUM_NOT_SET"],
    ),
    "not one of the choices": (["actor_rollout_ref.rollout.name=sglang"], ["rollout.name=sglang", "vllm or hf"]),
    "without effect": (
        ["algorithm.adv_estimator=grpo", "critic.optim.lr=1"],
        ["critic.optim.lr has no effect", "remove"],
    ),
    "out of range": (["actor_rollout_ref.rollout.top_p=1.5"], ["actor_rollout_ref.rollout.top_p=1.5", "at most 1"]),
}


@pytest.mark.parametrize("case", BEFORE_IMPORTS)
def test_the_command_line_itself(command: Preloaded, case):
    argv, parts = BEFORE_IMPORTS[case]
    check(command(PPO, argv), *parts)


def test_a_real_process_tells_a_mistyped_key_without_importing_torch():
    result = run(PPO, ["data.train_file=x.parquet"])
    check(result, "did you mean data.train_files?")
    assert result.out == "" and len(result.err.splitlines()) == 1


BEFORE_WORKERS = {
    "model path not set": ({MODEL: None}, ["actor_rollout_ref.model.path is not set"]),
    "model path that is not there": ({MODEL: "./nowhere/model"}, ["model.path=./nowhere/model", "no such directory"]),
    "hub name without network": ({MODEL: "nobody/no-such-model"}, ["nobody/no-such-model", "cannot be reached"]),
    "model without config": ({MODEL: "{no_config}"}, ["actor_rollout_ref.model.path", "no config.json"]),
    "model without tokenizer": ({MODEL: "{no_tokenizer}"}, ["actor_rollout_ref.model.path", "no tokenizer"]),
    "critic that is not there": ({"critic__model__path": "/nowhere"}, ["critic.model.path=/nowhere"]),
    "model too short": ({"data__max_prompt_length": 200}, ["data.max_prompt_length=200", "128 positions"]),
    "train file not set": ({"data__train_files": None}, ["data.train_files is not set"]),
    "missing file": (
        {"data__train_files": "/nowhere/a.parquet"},
        ["data.train_files=/nowhere/a.parquet", "no such file"],
    ),
    "missing validation file": ({"data__val_files": "/nowhere/b.parquet"}, ["data.val_files=/nowhere/b.parquet"]),
    "no validation file": ({"data__val_files": None}, ["data.val_files is not set", "val_before_train=false"]),
    "a number for a file": ({"data__train_files": 5}, ["data.train_files"]),
    "another kind of file": ({"data__train_files": "{text}"}, ["data.train_files", ".parquet or .jsonl"]),
    "missing column": ({"data__train_files": "{no_prompt}"}, ["no column 'prompt'", "it has data_source"]),
    "empty data set": ({"data__train_files": "{empty}"}, ["data.train_files", "no rows"]),
    "overlong prompt": ({"data__train_files": "{long}"}, ["row 0", "21 tokens", "data.max_prompt_length is 7"]),
    "batch larger than the data": (
        {"data__train_batch_size": 512, f"{ACTOR}ppo_mini_batch_size": 512},
        ["data.train_batch_size=512", "256 rows"],
    ),
    "mini-batch that does not divide": (
        {f"{ACTOR}ppo_mini_batch_size": 5},
        ["actor_rollout_ref.actor.ppo_mini_batch_size=5", "data.train_batch_size=16", "16 / 5 = 3.20"],
    ),
    "ranks that do not divide": ({"trainer__n_gpus_per_node": 3}, ["3 data-parallel ranks", "16 / 3 = 5.33"]),
    "micro-batch not set": (
        {f"{ACTOR}ppo_micro_batch_size_per_gpu": None},
        ["ppo_micro_batch_size_per_gpu is not set"],
    ),
    "GRPO with one response": ({"algorithm__adv_estimator": "grpo"}, ["rollout.n=1", "set it to 2 or more"]),
    "unknown estimator": ({"algorithm__adv_estimator": "gea"}, ["algorithm.adv_estimator", "did you mean 'gae'?"]),
    "unknown loss": (
        {f"{ACTOR}policy_loss__loss_mode": "vanila"},
        ["policy_loss.loss_mode", "did you mean 'vanilla'?"],
    ),
    "unknown aggregation": ({f"{ACTOR}loss_agg_mode": "token-men"}, ["loss_agg_mode", "did you mean 'token-mean'?"]),
    "unknown aggregation of the critic": ({"critic__loss_agg_mode": "sum"}, ["critic.loss_agg_mode", "sum"]),
    "unknown KL": (
        {f"{ACTOR}use_kl_loss": "true", f"{ACTOR}kl_loss_type": "low_var"},
        ["kl_loss_type", "did you mean 'low_var_kl'?"],
    ),
    "unknown KL in the reward": (
        {"algorithm__kl_ctrl__kl_coef": 0.1, "algorithm__kl_penalty": "klk"},
        ["algorithm.kl_penalty", "did you mean 'kl'?"],
    ),
    "unknown KL controller": (
        {"algorithm__kl_ctrl__kl_coef": 0.1, "algorithm__kl_ctrl__type": "adaptiv"},
        ["algorithm.kl_ctrl.type=adaptiv", "adaptive"],
    ),
    "unknown logger": ({"trainer__logger": "[consol]"}, ["trainer.logger", "did you mean console?"]),
    "run directory that is a file": ({"trainer__default_local_dir": "{text}"}, ["trainer.default_local_dir"]),
    "reward file not there": (
        {"custom_reward_function__path": "/nowhere/r.py"},
        ["custom_reward_function.path", "r.py"],
    ),
    "reward function that raises": (
        {"custom_reward_function__path": "{raises}"},
        ["reward function", "compute_score", "ZeroDivisionError", "row 0"],
    ),
    "reward function that returns None": ({"custom_reward_function__path": "{none}"}, ["compute_score", "None"]),
    "reward function of another signature": (
        {"custom_reward_function__path": "{signature}"},
        ["compute_score(text)", "data_source, solution_str, ground_truth, extra_info"],
    ),
    "reward function of another name": (
        {"custom_reward_function__path": "{other_name}"},
        ["custom_reward_function.name", "did you mean compute_scores?"],
    ),
    "reward file that does not parse": ({"custom_reward_function__path": "{syntax}"}, ["at line 1", "SyntaxError"]),
    "no reward for the data": ({"custom_reward_function__path": None}, ["podium/sort6", "custom_reward_function.path"]),
    "no CUDA": ({"trainer__device": "cuda"}, ["trainer.device=cuda", "use auto or cpu"]),
}


@pytest.mark.parametrize("case", BEFORE_WORKERS)
def test_before_any_worker_starts(command: Preloaded, task: SmallTask, files, tmp_path, case):
    changes, parts = BEFORE_WORKERS[case]
    filled = {key: value.format(**files) if isinstance(value, str) else value for key, value in changes.items()}
    result = command(PPO, task.ppo(tmp_path / "run", **filled))
    check(result, *parts)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_vllm_not_installed(command: Preloaded, task: SmallTask, tmp_path):
    program = tmp_path / "without_vllm.py"
    program.write_text(
        "from importlib.machinery import PathFinder\n"
        "found = PathFinder.find_spec\n"
        "def hide(name, path=None, target=None):\n"
        "    return None if name.split('.')[0] == 'vllm' else found(name, path, target)\n"
        "PathFinder.find_spec = hide\n"
        "from podium.trainer.main_ppo import main, run_main\n"
        "run_main(main)\n"
    )
    result = command(str(program), task.ppo(tmp_path / "run", **{ROLLOUT: "vllm"}))
    check(result, "vllm is not installed", "pip install 'podium[cpu]'", "actor_rollout_ref.rollout.name=hf")


def test_a_head_too_small_for_vllm_on_a_cpu(command: Preloaded, task: SmallTask, tmp_path):
    shutil.copytree(task.model, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"head_dim": 32', '"head_dim": 16'))
    result = command(PPO, task.ppo(tmp_path / "run", **{ROLLOUT: "vllm", MODEL: tmp_path / "model"}))
    check(result, "head_dim is 16", "multiples of 32", "actor_rollout_ref.rollout.name=hf")


def test_a_ray_that_is_not_there(command: Preloaded, task: SmallTask, tmp_path):
    argv = task.ppo(tmp_path / "run", trainer__backend="ray")
    check(command(PPO, argv, env={"RAY_ADDRESS": "127.0.0.1:1"}), "127.0.0.1:1", "refused", "unset it")


def test_ray_without_enough_cpus(command: Preloaded, task: SmallTask, tmp_path):
    changes = {"data__train_batch_size": 64, f"{ACTOR}ppo_mini_batch_size": 64}
    argv = task.ppo(tmp_path / "run", trainer__backend="ray", trainer__n_gpus_per_node=64, **changes)
    check(command(PPO, argv), "needs 64 bundles of 1 CPUs", "use fewer ranks")


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_reward_function_that_fails_in_mid_run(command: Preloaded, task: SmallTask, files, tmp_path, backend):
    reward = files["raises_later"]
    result = command(PPO, task.ppo(tmp_path / "run", trainer__backend=backend, custom_reward_function__path=reward))
    check(result, "compute_score", "KeyError", "sample 0", workers_started=True)


SFT_CASES = {
    "unknown key": ({"data__train_bach_size": 1}, ["did you mean data.train_batch_size?"]),
    "missing file": ({"data__train_files": "/nowhere/a.parquet"}, ["data.train_files=/nowhere/a.parquet"]),
    "missing column": ({"data__response_key": "answer"}, ["no column 'answer' (data.response_key)"]),
    "model path that is not there": ({"model__path": "/nowhere"}, ["model.path=/nowhere"]),
    "batch larger than the data": ({"data__train_batch_size": 256}, ["data.train_batch_size=256", "128 rows"]),
    "ranks that do not divide": (
        {"trainer__n_gpus_per_node": 3},
        ["data.train_batch_size=32", "3 data-parallel ranks", "10.67"],
    ),
    "batch of nothing": ({"data__train_batch_size": 0}, ["data.train_batch_size=0", "at least 1"]),
    "logging never": ({"trainer__log_freq": 0}, ["trainer.log_freq=0", "at least 1"]),
    "unknown device": ({"trainer__device": "gpu"}, ["trainer.device=gpu", "auto or cpu or cuda"]),
    "unknown precision": ({"fsdp_config__dtype": "float8"}, ["fsdp_config.dtype=float8", "bfloat16"]),
    "unknown backend": ({"trainer__backend": "slurm"}, ["trainer.backend=slurm", "ray or local"]),
    "without effect": ({"data__shuffle": "false", "data__seed": 3}, ["data.seed has no effect"]),
}


@pytest.mark.parametrize("case", SFT_CASES)
def test_sft(command: Preloaded, task: SmallTask, tmp_path, case):
    changes, parts = SFT_CASES[case]
    check(command(SFT, task.sft(tmp_path / "run", **changes)), *parts)
