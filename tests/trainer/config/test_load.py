"""From command lines to typed configurations."""

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from podium.trainer.config import PPOConfig, SFTConfig, load_config, parse_command_line
from podium.trainer.config.load import help_text, walk
from podium.utils.errors import UserError
from podium.utils.redact import redact

CLASSES = [PPOConfig, SFTConfig]


def load(*argv: str) -> PPOConfig:
    return load_config(PPOConfig, list(argv))[0]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_has_a_docstring(cls):
    assert [key for key, _, _, doc in walk(cls) if not doc] == []


@pytest.mark.parametrize("cls", CLASSES)
def test_help_names_every_key_with_its_default_and_meaning(cls):
    text = help_text(cls, "python3 -m x")
    lines = text.splitlines()
    assert lines[0] == "usage: python3 -m x [--config FILE] [--print-config] key=value ..."
    for key, _, default, doc in walk(cls):
        at = lines.index(f"  {key}={'null' if default is None else default}")
        assert lines[at + 1].strip() == doc


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults_alone_are_a_configuration(cls):
    config, explicit = load_config(cls, [])
    assert config == cls() and explicit == set()


@pytest.mark.parametrize("cls", CLASSES)
def test_every_default_can_be_given_on_the_command_line(cls):
    argv = []
    for key, kind, default, _ in walk(cls):
        if default is None:
            value = "null"
        elif isinstance(default, str):
            value = f'"{default}"'
        else:
            value = str(default).replace("'", "")
        argv.append(f"{key}={value}")
        assert kind is not None
    config, explicit = load_config(cls, argv)
    assert config == cls() and explicit == {key for key, _, _, _ in walk(cls)}


def test_values_of_every_kind():
    config = load(
        "data.train_files=[a.parquet,b.parquet]",
        "data.shuffle=False",
        "data.val_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "critic.cliprange_value=null",
        "trainer.logger=['console','wandb']",
        "trainer.experiment_name=run 1",
        "+trainer.total_training_steps=7",
    )
    assert config.data.train_files == ["a.parquet", "b.parquet"] and config.data.shuffle is False
    assert config.data.val_batch_size == 8 and config.actor_rollout_ref.actor.optim.lr == 1e-4
    assert config.actor_rollout_ref.actor.optim.betas == [0.9, 0.95]
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.28 and config.critic.cliprange_value is None
    assert config.trainer.logger == ["console", "wandb"] and config.trainer.experiment_name == "run 1"
    assert config.trainer.total_training_steps == 7


def test_the_last_of_two_wins():
    assert load("trainer.seed=1", "trainer.seed=2").trainer.seed == 2


def test_one_string_is_a_list_of_one():
    assert load("trainer.logger=wandb").trainer.logger == ["wandb"]


def test_files_come_before_the_command_line(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("data: {seed: 7, train_files: [x.parquet]}\nactor_rollout_ref.actor.optim.lr: 1e-5\n")
    second.write_text("data:\n  seed: 8\ncustom_reward_function: {reward_kwargs: {weights: {a: 1}}}\n")
    argv = ["--config", str(first), f"--config={second}", "data.shuffle=true", "data.train_batch_size=4"]
    config, explicit = parse_command_line(PPOConfig, "python3 -m y", argv)
    assert (config.data.seed, config.data.train_batch_size, config.data.train_files) == (8, 4, ["x.parquet"])
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.custom_reward_function.reward_kwargs == {"weights": {"a": 1}}
    assert {"data.seed", "data.shuffle", "data.train_batch_size", "actor_rollout_ref.actor.optim.lr"} <= explicit


@pytest.mark.parametrize("cls", CLASSES)
def test_the_config_of_a_run_repeats_it(cls, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dataclasses.asdict(load_config(cls, ["data.seed=5"])[0])))
    config, explicit = load_config(cls, [], [str(file)])
    assert config == load_config(cls, ["data.seed=5"])[0] and explicit == {"data.seed"}


def test_what_the_config_of_a_run_does_not_have_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER_JUDGE", "sk-from-environment")
    file, key = tmp_path / "config.json", "custom_reward_function.reward_kwargs"

    def run_again(given: str, *overrides: str) -> dict[str, str]:
        config, _ = load_config(PPOConfig, [given])
        file.write_text(json.dumps(redact(dataclasses.asdict(config))))
        return load_config(PPOConfig, list(overrides), [str(file)])[0].custom_reward_function.reward_kwargs

    assert run_again(f"{key}.api_key='${{oc.env:OTHER_JUDGE}}'") == {"api_key": "sk-from-environment"}
    assert run_again(f"{key}.api_key=sk-literal-1", f"{key}.api_key=sk-literal-2") == {"api_key": "sk-literal-2"}
    with pytest.raises(UserError, match=rf"{key}.api_key: a secret is not written down with a run; give it again"):
        run_again(f"{key}.api_key=sk-literal-1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {sed: 1}", "f.yaml: data.sed=1: there is no key 'data.sed'; did you mean data.seed?"),
        ("data: 5", "f.yaml: data=5: there is no key 'data'"),
        ("[1, 2]", "f.yaml: expected a mapping of keys, got list"),
        ("a: [", "f.yaml: neither YAML nor JSON"),
        ("data: {seed: x}", "data.seed takes int, got 'x'"),
    ],
)
def test_files_that_are_refused(text, message, tmp_path):
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(PPOConfig, [], [str(tmp_path / "f.yaml")])


def test_a_file_that_is_not_there():
    with pytest.raises(UserError, match=r"--config nowhere\.yaml: No such file"):
        load_config(PPOConfig, [], ["nowhere.yaml"])
    with pytest.raises(UserError, match="--config needs a file"):
        parse_command_line(PPOConfig, "python3 -m y", ["data.seed=1", "--config"])


def test_roles_do_not_share_their_pieces():
    config = load("critic.optim.lr=1")
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6


def test_free_form_keys_are_the_users_own():
    argv = [
        "custom_reward_function.reward_kwargs.weights.length=0.5",
        "custom_reward_function.reward_kwargs.mode=strict",
    ]
    config, explicit = load_config(PPOConfig, argv)
    assert config.custom_reward_function.reward_kwargs == {"weights": {"length": 0.5}, "mode": "strict"}
    assert explicit == {text.split("=")[0] for text in argv}


def test_environment_variables(monkeypatch):
    monkeypatch.setenv("PODIUM_TEST_DIR", "/runs")
    assert load("trainer.default_local_dir=${oc.env:PODIUM_TEST_DIR}/a").trainer.default_local_dir == "/runs/a"


REFUSED = {
    "data.train_batchsize=4": "no key 'data.train_batchsize'; did you mean data.train_batch_size?",
    "critic.ppo_epoch=1": "did you mean critic.ppo_epochs?",
    "ppo_mini_batch_size=4": "did you mean [a-z_.]*ppo_mini_batch_size?",
    "critic=5": "no key 'critic'",
    "zzz=1": "no key 'zzz'; --help lists all keys",
    "data.train_batch_size=four": "data.train_batch_size takes int, got 'four'",
    "data.train_batch_size=1.5": "takes int, got 1.5",
    "data.train_batch_size=null": "takes int, got None",
    "data.shuffle=maybe": "takes bool, got 'maybe'",
    "trainer.logger=5": r"trainer.logger takes list\[str\], got 5$",
    "actor_rollout_ref.actor.use_dynamic_bsz=True": "not needed: batches are cut by ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.multi_turn.enable=true": "not offered",
    "data.val_batch_size=x": "data.val_batch_size takes int",
    "data.train_files": "not of the form key=value",
    "=4": "there is no key ''",
    "~data.seed": "no deletions",
    "data.seed=1,2": "no sweeps",
    "trainer.default_local_dir=${oc.env:PODIUM_NOT_SET}": "trainer.default_local_dir: .*PODIUM_NOT_SET",
    "trainer.default_local_dir=${nothing}": "trainer.default_local_dir: .*nothing",
    "trainer.experiment_name=???": "trainer.experiment_name",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text):
    with pytest.raises(UserError, match=REFUSED[text]):
        load(text)


def test_underscores_in_bands_are_no_thousands():
    key = "algorithm.rollout_correction.rollout_is_threshold"
    assert load(f"{key}=0.5_2").algorithm.rollout_correction.rollout_is_threshold == "0.5_2"
    assert load("data.train_batch_size=1_024").data.train_batch_size == 1024


@dataclass
class Inner:
    width: int = 3
    """Columns,
    in characters."""


@dataclass
class Base:
    inner: Inner = field(default_factory=lambda: Inner(width=5))
    name: str = "x"
    """A name."""


@dataclass
class Derived(Base):
    """Not the docstring of a field."""

    undocumented: Any = None
    free: dict[str, Any] = field(default_factory=dict)
    """Anything."""


def test_walk_goes_through_bases_and_nested_classes_and_takes_the_defaults_in_force():
    assert [(key, kind, doc) for key, kind, _, doc in walk(Derived)] == [
        ("inner.width", int, "Columns, in characters."),
        ("name", str, "A name."),
        ("undocumented", Any, ""),
        ("free", dict[str, Any], "Anything."),
    ]
    assert [default for _, _, default, _ in walk(Derived)] == [5, "x", None, {}]


def test_the_default_shown_is_the_one_in_force():
    defaults = {key: default for key, _, default, _ in walk(PPOConfig)}
    assert defaults["critic.optim.lr"] == PPOConfig().critic.optim.lr != defaults["actor_rollout_ref.actor.optim.lr"]


def test_help_and_print_config_answer_and_end(capsys):
    with pytest.raises(SystemExit) as end:
        parse_command_line(PPOConfig, "python3 -m y", ["data.seed=5", "--help"])
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage: python3 -m y [--config FILE]")
    with pytest.raises(SystemExit) as end:
        parse_command_line(PPOConfig, "python3 -m y", ["data.seed=5", "--print-config"])
    assert end.value.code == 0 and "\n  seed: 5\n" in capsys.readouterr().out


def test_configuration_imports_without_the_machine_learning_stack():
    program = (
        "import sys, podium.trainer.config; "
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'numpy', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
