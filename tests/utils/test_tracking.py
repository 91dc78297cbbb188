import json
import sys
import time

import numpy as np
import pytest
import torch

from podium.utils.errors import UserError
from podium.utils.tracking import Tracking


def tracking(run_dir, loggers=(), config=None, **kwargs):
    return Tracking(list(loggers), run_dir, "project", "experiment", config or {}, total_steps=10, **kwargs)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_one_sorted_object_a_line_and_on_disk_at_once(tmp_path):
    with tracking(tmp_path) as tracker:
        tracker.log({"b": np.float32(0.1), "a": torch.tensor(2), "c": 1 / 3, "note": "x"}, step=1)
        assert (tmp_path / "metrics.jsonl").read_text() == (
            '{"step": 1, "a": 2, "b": 0.10000000149011612, "c": 0.3333333333333333, "note": "x"}\n'
        )


def test_equal_runs_give_equal_lines(tmp_path):
    for name in ("one", "two"):
        with tracking(tmp_path / name) as tracker:
            for step in range(3):
                values = {"actor/pg_loss": torch.tensor(0.1) * step, "critic/score/mean": np.float64(1e-17) * step}
                tracker.log(dict(reversed(values.items())) if name == "two" else values, step=step)
    assert (tmp_path / "one/metrics.jsonl").read_bytes() == (tmp_path / "two/metrics.jsonl").read_bytes()


def test_non_finite_numbers_leave_valid_json(tmp_path):
    with tracking(tmp_path) as tracker:
        tracker.log({"a": float("nan"), "b": torch.tensor(float("inf")), "c": -np.inf}, step=0)
    text = (tmp_path / "metrics.jsonl").read_text()
    got = json.loads(text, parse_constant=pytest.fail)
    assert got == {"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert np.isnan(float(got["a"])) and float(got["b"]) == np.inf


def test_a_metric_that_is_no_number_is_our_mistake(tmp_path):
    with tracking(tmp_path) as tracker, pytest.raises(TypeError, match="metric a is Tensor"):
        tracker.log({"a": torch.zeros(2)}, step=0)


def test_a_new_run_moves_old_files_aside_and_a_resumed_one_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with tracking(tmp_path) as tracker:
        for step in range(4):
            tracker.log({"x": step}, step)
            tracker.table("val", ["prompt"], [[str(step)]])
    with path.open("a") as file:
        file.write('{"step": 4, "x"')  # killed while writing
    with tracking(tmp_path, resume_step=2) as tracker:
        tracker.log({"x": 30}, 3)
    assert lines(path) == [{"step": s, "x": x} for s, x in ((0, 0), (1, 1), (2, 2), (3, 30))]
    assert [row["step"] for row in lines(tmp_path / "val_samples.jsonl")] == [0, 1, 2]
    for _ in range(2):  # a run that dies before its first step does not push the last one out
        tracking(tmp_path).close()
    assert len(lines(tmp_path / "metrics.previous.jsonl")) == 4
    assert path.read_text() == ""


def test_samples_are_kept_whole_and_shown(tmp_path, capsys):
    with tracking(tmp_path, ["console"]) as tracker:
        tracker.log({"critic/score/mean": 0.5}, step=7)
        tracker.table("validation", ["prompt", "score"], [["[b]\n" + "y" * 900, np.float32(1)]])
    assert lines(tmp_path / "val_samples.jsonl") == [
        {"step": 7, "title": "validation", "prompt": "[b]\n" + "y" * 900, "score": 1.0}
    ]
    out = capsys.readouterr().out
    assert "step  7/10  reward      0.5" in out and "[b]\\n" in out


def test_secrets_do_not_reach_the_config_file(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "very-secret-value")
    config = {"trainer": {"lr": 0.1, "api_key": "abc"}, "url": "http://very-secret-value@host"}
    tracking(tmp_path, config=config).close()
    text = (tmp_path / "config.json").read_text()
    assert "very-secret-value" not in text and "abc" not in text
    assert json.loads(text)["trainer"]["lr"] == 0.1


def test_an_unknown_logger_names_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"trainer.logger: there is no 'tensorbord'; did you mean tensorboard\?"):
        tracking(tmp_path, ["tensorbord"])
    with pytest.raises(UserError, match="choose from console, tensorboard, wandb"):
        tracking(tmp_path, ["xyz"])


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard")])
def test_a_logger_that_is_not_installed_names_the_extra_and_touches_nothing(tmp_path, monkeypatch, name, module):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"trainer.logger: {name} is not installed; pip install 'podium\[{name}\]'"):
        tracking(tmp_path, ["console", name])
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_a_run_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"trainer.default_local_dir=.*file"):
        tracking(tmp_path / "file")


def test_tensorboard_gets_the_numbers(tmp_path):
    with tracking(tmp_path, ["tensorboard"], {"api_key": "abc"}) as tracker:
        tracker.log({"actor/pg_loss": 0.5, "note": "text"}, step=3)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["actor/pg_loss"]
    [event] = events.Scalars("actor/pg_loss")
    assert (event.step, event.value) == (3, 0.5)
    assert b"abc" not in b"".join(file.read_bytes() for file in (tmp_path / "tensorboard").iterdir())


def test_a_resumed_run_has_each_step_once_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def written(run_dir):
        events = EventAccumulator(str(run_dir / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("x")]

    with tracking(tmp_path, ["tensorboard"]) as tracker:
        for step in range(5):
            tracker.log({"x": step}, step)
    with tracking(tmp_path, ["tensorboard"], resume_step=2) as tracker:
        for step in range(3, 6):
            tracker.log({"x": 10 * step}, step)
    assert written(tmp_path) == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]
    with tracking(tmp_path, ["tensorboard"]) as tracker:  # another run: the old one is moved aside
        tracker.log({"x": 7}, 0)
    assert written(tmp_path) == [(0, 7)]


@pytest.fixture
def no_wandb_key(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no key kept from an earlier login
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def test_a_resumed_run_is_the_same_in_wandb(tmp_path, no_wandb_key):
    ids = []
    for resume_step in (None, 1, None):
        with tracking(tmp_path, ["wandb"], resume_step=resume_step) as tracker:
            tracker.log({"x": 1}, 2)
        ids.append((tmp_path / "wandb_run_id.txt").read_text().strip())
    assert ids[0] == ids[1] != ids[2]
    recorded = [file.stem.removeprefix("run-") for file in (tmp_path / "wandb").glob("offline-run-*/*.wandb")]
    assert set(recorded) == set(ids)


def test_wandb_without_a_key_records_offline_and_says_so_once(tmp_path, no_wandb_key, capfd):
    with tracking(tmp_path / "run", ["wandb"]) as tracker:
        tracker.log({"actor/pg_loss": 0.5}, step=1)
    out, err = capfd.readouterr()
    assert (out + err).count("offline") == 1 and "no API key" in out
    [recorded] = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    deadline = time.monotonic() + 30  # wandb's own service process writes the file, at its own pace
    while b"actor/pg_loss" not in recorded.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
