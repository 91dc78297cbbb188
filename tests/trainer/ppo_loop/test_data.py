"""Data sets and orders of one's own, and mixtures, through a real run."""

import json

import pyarrow.parquet as pq
import pytest

from podium.trainer.config import PPOConfig, check_config, load_config
from podium.trainer.main_ppo import train
from podium.utils.errors import UserError

PLUGIN = """
import numpy as np
from podium.utils.dataset import PromptDataset
from podium.utils.dataset_order import Sampler


class Halves(PromptDataset):
    \"\"\"Half of the prompts.\"\"\"

    def __len__(self):
        return super().__len__() // 2


class Hardest(Sampler):
    \"\"\"Goes on with the rows that scored lowest.\"\"\"

    def __init__(self, dataset, batch_size, seed):
        self.scores, self.batch_size = [1.0] * len(dataset), batch_size
        self.scores[-batch_size:] = [0.5] * batch_size

    def __next__(self):
        return 0, np.argsort(self.scores, kind="stable")[: self.batch_size]

    def update(self, batch):
        for row, score in zip(batch.non_tensor_batch["index"], batch.batch["sequence_scores"].tolist()):
            self.scores[row] = 2.0 + score

    def state_dict(self):
        return {"scores": self.scores}

    def load_state_dict(self, state):
        self.scores = list(state["scores"])


class Neither:
    pass
"""


@pytest.fixture
def plugin(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    return file


def run(task, tmp_path, **changes):
    config, explicit = load_config(PPOConfig, task.ppo(tmp_path / "run", **changes))
    check_config(config, explicit)
    train(config)
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_a_data_set_and_a_curriculum_of_one_s_own(task, plugin, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    changes = {"data__custom_cls__path": plugin, "data__custom_cls__name": "Halves"}
    changes |= {"data__sampler__path": plugin, "data__sampler__name": "Hardest", "trainer__save_freq": 1}
    run(task, tmp_path, **changes)
    assert "(8 an epoch)" in capsys.readouterr().out, "half of 256 prompts, 16 a batch"
    states = [
        json.loads((tmp_path / "run" / f"global_step_{step}" / "manifest.json").read_text())["driver"]["source"][
            "loader"
        ]["scores"]
        for step in (1, 3)
    ]
    assert all(score >= 2 for score in states[0][-16:]) and sum(score >= 2 for score in states[0]) == 16
    assert sum(score >= 2 for score in states[1]) == 48, "each batch was told before the next was drawn"


def test_a_mixture(task, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    table = pq.read_table(task.train)
    for name, rows in {"few": table.slice(0, 6), "many": table.slice(6)}.items():
        pq.write_table(rows, tmp_path / f"{name}.parquet")
    changes = {"data__train_files": f"[{tmp_path}/few.parquet,{tmp_path}/many.parquet]", "trainer__save_freq": 3}
    run(task, tmp_path, data__train_weights="[3,1]", **changes)
    state = json.loads((tmp_path / "run" / "global_step_3" / "manifest.json").read_text())["driver"]["source"]["loader"]
    assert state["drawn"] == [36, 12]


def test_what_is_refused(task, plugin, tmp_path):
    for changes, message in (
        ({"data__custom_cls__name": "Halves"}, "data.custom_cls.name has no effect without data.custom_cls.path"),
        ({"data__sampler__path": plugin, "data__shuffle": "false"}, "data.shuffle has no effect with a data.sampler"),
        ({"data__train_weights": "[1,2]"}, "expected a number above 0 for each of the 1 entries of data.train_files"),
        ({"data__custom_cls__path": plugin, "data__custom_cls__name": "Neither"}, "no class of that name that extends"),
        ({"data__sampler__path": plugin}, "data.sampler.name=None: .*mine.py has no class .* that extends Sampler"),
    ):
        with pytest.raises(UserError, match=message):
            run(task, tmp_path, **changes)
