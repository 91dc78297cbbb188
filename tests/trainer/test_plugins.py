"""Methods registered from outside the package, here and in a process that gets only a pickle."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from podium.trainer.config.training import ActorConfig
from podium.trainer.plugins import PluggedName, load_plugins
from podium.trainer.ppo.advantages import get_adv_estimator_fn
from podium.trainer.ppo.losses import get_policy_loss_fn, register_policy_loss
from podium.trainer.ppo.objectives import PolicyObjective
from podium.utils.errors import UserError

PLUGIN = """
from podium.trainer.ppo.advantages import register_adv_est
from podium.trainer.ppo.losses import compute_policy_loss_gpg, register_policy_loss

@register_adv_est("{name}")
def estimator(token_level_rewards, response_mask):
    return token_level_rewards, token_level_rewards

@register_policy_loss("{name}")
def loss(**arguments):
    return compute_policy_loss_gpg(**arguments)
"""


def write(folder: Path, name: str) -> str:
    file = folder / f"{name}.py"
    file.write_text(PLUGIN.format(name=name))
    return str(file)


def test_a_file_registers_once_a_process(tmp_path):
    file = write(tmp_path, "from_file")
    assert load_plugins([file]) == (file,)
    loss = get_policy_loss_fn("from_file")
    load_plugins([file])
    assert get_policy_loss_fn("from_file") is loss and get_adv_estimator_fn("from_file")


def test_a_module_is_found_by_name(tmp_path, monkeypatch):
    write(tmp_path, "podium_test_plugin")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_plugins(["podium_test_plugin"]) == ("podium_test_plugin",)
    assert get_policy_loss_fn("podium_test_plugin")


def test_a_relative_path_means_the_same_in_a_worker(tmp_path, monkeypatch):
    write(tmp_path, "relative")
    monkeypatch.chdir(tmp_path)
    assert load_plugins(["relative.py"]) == (str(tmp_path / "relative.py"),)


BAD = {
    "no such file": ("{folder}/nowhere.py", "trainer.plugins=.*nowhere.py: there is no such file"),
    "no such module": ("podium_nowhere.mine", "there is no module podium_nowhere.mine; give a file"),
    "raises": ("{folder}/raises.py", "raises.py: importing it fails at line 2 with ZeroDivisionError"),
    "imports what is not there": ("lacks", "importing lacks fails with ModuleNotFoundError.*podium_nowhere"),
    "module that raises": ("raises", "importing raises fails at line 2 with ZeroDivisionError"),
    "taken name": ("{folder}/taken.py", "'gae' is already registered by podium"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_plugin_is_named(tmp_path, monkeypatch, case):
    (tmp_path / "raises.py").write_text("x = 1\n1 / 0\n")
    (tmp_path / "lacks.py").write_text("import podium_nowhere\n")
    (tmp_path / "taken.py").write_text(PLUGIN.format(name="gae"))
    monkeypatch.syspath_prepend(tmp_path)
    name, message = BAD[case]
    with pytest.raises(UserError, match=message):
        load_plugins([name.format(folder=tmp_path)])


def config(loss: str) -> ActorConfig:
    actor = ActorConfig()
    actor.policy_loss.loss_mode = loss
    return actor


def test_an_objective_takes_its_plugin_to_another_process(tmp_path):
    objective = PolicyObjective.from_config(config("in_worker"), [write(tmp_path, "in_worker")])
    (tmp_path / "objective.pkl").write_bytes(pickle.dumps(objective))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).loss_fn.__qualname__)"
    command = [sys.executable, "-c", code, str(tmp_path / "objective.pkl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "loss", done.stderr


def test_a_name_takes_its_plugins_to_another_process(tmp_path):
    (tmp_path / "name.pkl").write_bytes(pickle.dumps(PluggedName("mine", [write(tmp_path, "behind_a_name")])))
    code = (
        "import pickle, sys; name = pickle.load(open(sys.argv[1], 'rb'));"
        "from podium.trainer.ppo.losses import get_policy_loss_fn;"
        "print(name, get_policy_loss_fn('behind_a_name').__qualname__)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "name.pkl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "mine loss", done.stderr


def test_a_loss_of_another_signature_is_refused_at_once():
    @register_policy_loss("verls_signature")
    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights):
        raise AssertionError

    with pytest.raises(UserError, match=r"loss_mode=verls_signature: .*cannot be called with the keywords .*denomin"):
        PolicyObjective.from_config(config("verls_signature"))
