import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.protocol.data import DataProto
from podium.utils.dataset import PromptDataset, collate_prompts
from podium.utils.errors import UserError
from podium.utils.torch_functional import place_on_last_token
from podium.workers.reward.failures import RewardError
from podium.workers.reward.functions import RewardSource, default_compute_score
from podium.workers.reward.manager import RewardManager
from tests.utils.small_tokenizers import char_tokenizer
from tests.workers.reward.direct import DirectScorer

TOKENIZER = char_tokenizer()


def manager_of(fn, **kwargs):
    return RewardManager(DirectScorer(fn), TOKENIZER, **kwargs)


PAD, EOS = TOKENIZER.pad_token_id, TOKENIZER.eos_token_id
WIDTH = 6


def batch_of(*texts, **objects):
    """Responses "12$" where $ is end-of-sequence; everything after their end is padding."""
    ids = [[EOS if c == "$" else TOKENIZER.convert_tokens_to_ids(c) for c in text] for text in texts]
    responses = torch.tensor([row + [PAD] * (WIDTH - len(row)) for row in ids])
    mask = torch.tensor([[i < len(row) for i in range(WIDTH)] for row in ids])
    columns = {
        "data_source": ["exact_match"] * len(texts),
        "reward_model": [{"style": "rule", "ground_truth": "12"}] * len(texts),
        "extra_info": [{"n": i} for i in range(len(texts))],
        **objects,
    }
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return DataProto.from_dict({"responses": responses, "response_mask": mask}, arrays)


def test_scores_lie_on_the_last_token():
    data = batch_of("12$", "12", "21$", "121212")
    before = set(data.batch.keys()), set(data.non_tensor_batch)
    result = manager_of(default_compute_score)(data)
    assert result.batch["token_level_scores"].dtype == torch.float32
    assert result.batch["token_level_scores"].tolist() == [
        [0, 0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
    ]
    assert result.meta_info["metrics"] == {
        "reward/score/mean": 0.5,
        "reward/score/min": 0.0,
        "reward/score/max": 1.0,
        "reward/finished/mean": 0.5,
        **dict.fromkeys(
            ("reward/failure_rate", "reward/timeout_rate", "reward/error_rate", "reward/abstain_rate"), 0.0
        ),
    }
    assert (set(data.batch.keys()), set(data.non_tensor_batch)) == before
    del result.meta_info["metrics"]
    assert "token_level_scores" in data.union(result).batch.keys()  # noqa: SIM118


def test_the_function_sees_the_row_the_text_and_whether_it_finished():
    calls = []

    def fn(data_source, solution_str, ground_truth, extra_info):
        calls.append((data_source, solution_str, ground_truth, extra_info))
        return 0

    data = batch_of("12$", "12", "")
    manager_of(fn)(data)
    assert calls == [
        ("exact_match", "12", "12", {"n": 0, "response_finished": True}),
        ("exact_match", "12", "12", {"n": 1, "response_finished": False}),
        ("exact_match", "", "12", {"n": 2, "response_finished": False}),
    ]
    assert data.non_tensor_batch["extra_info"][0] == {"n": 0}
    # Several ids may end a response, and padding that is also end-of-sequence does not.
    calls.clear()
    data = batch_of("12", "1")
    data.batch["responses"][1, 1:] = EOS
    data.meta_info["eos_token_id"] = [EOS, TOKENIZER.convert_tokens_to_ids("2")]
    manager_of(fn)(data)
    assert [extra["response_finished"] for *_, extra in calls] == [True, False]


def test_absent_columns_are_no_hindrance():
    data = batch_of("12$")
    data = DataProto.from_dict(dict(data.batch.items()))
    seen = []
    manager_of(lambda **call: seen.append(call) or 1.0)(data)
    assert seen[0]["data_source"] == "unknown" and seen[0]["ground_truth"] is None


def test_tokens_of_others_are_decoded_but_get_no_score():
    data = batch_of("12+34$")
    data.batch["response_mask"] = torch.tensor([[True, True, False, False, False, False]])
    data.batch["attention_mask"] = torch.tensor([[False, True, True] + [True] * WIDTH])
    seen = []
    result = manager_of(lambda **call: seen.append(call["solution_str"]) or 1.0)(data)
    assert seen == ["12+34"]
    assert result.batch["token_level_scores"].tolist() == [[0, 1, 0, 0, 0, 0]]


def test_further_keys_are_columns_and_metrics():
    results = iter([{"score": 1, "acc": True, "text": "a"}, {"score": 0, "acc": False, "text": "b", "part": 0.5}])
    result = manager_of(lambda **_: next(results))(batch_of("1$", "2$"))
    columns = {name: column.tolist() for name, column in result.non_tensor_batch.items()}
    assert columns == {"acc": [True, False], "text": ["a", "b"], "part": [None, 0.5]}
    metrics = result.meta_info["metrics"]
    assert (metrics["reward/acc/mean"], metrics["reward/part/mean"]) == (0.5, 0.5)
    assert "reward/text/mean" not in metrics


def test_a_key_that_is_a_column_already_is_refused():
    manager = manager_of(lambda **_: {"score": 1, "data_source": "x"})
    with pytest.raises(RewardError, match="key 'data_source', which is a column already"):
        manager(batch_of("1$"))


@pytest.mark.parametrize("value", [None, float("nan"), "1"])
def test_a_result_that_is_no_number_stops_with_the_sample(value):
    results = iter([1.0, value])
    with pytest.raises(
        RewardError, match=r"sample 1 of the batch \(data row 41\), data_source 'exact_match': it returned"
    ):
        manager_of(lambda **_: next(results))(batch_of("1$", "2$", index=[40, 41]))


def test_an_exception_names_sample_function_and_place(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float(solution_str)\n"
    )
    with pytest.raises(RewardError) as caught:
        manager_of(RewardSource(str(path)).load())(batch_of("1$", "x$"))
    text = str(caught.value)
    assert isinstance(caught.value, UserError) and "\n" not in text
    for part in ("sample 1 of the batch", "ValueError: could not convert", "bad.py line 2"):
        assert part in text
    assert "Traceback" in caught.value.outcome.traceback


def test_rows_without_a_score_are_no_zeros(tmp_path, capsys):
    results = iter([1.0, {"score": None}, {"abstain": "no truth"}, 0.5, {"abstain": "no truth"}])
    manager = manager_of(lambda **_: next(results), max_failure_rate=0.6)
    manager.failures.keep_in(tmp_path)
    result = manager(batch_of("1$", "2$", "3$", "4$", "5$", index=[10, 11, 12, 13, 14]))
    assert result.batch["scored"].tolist() == [True, False, False, True, False]
    metrics = result.meta_info["metrics"]
    assert (metrics["reward/score/mean"], metrics["reward/score/min"]) == (0.75, 0.5)
    rates = {name: metrics[f"reward/{name}_rate"] for name in ("failure", "timeout", "error", "abstain")}
    assert rates == {"failure": 0.6, "timeout": 0.0, "error": 0.2, "abstain": 0.4}
    out = capsys.readouterr().out
    assert "first error, on sample 1 of the batch (data row 11)" in out
    assert out.count("first abstain") == 1 and "(data row 12)" in out and "(data row 14)" not in out
    kept = [json.loads(line) for line in (tmp_path / "reward_failures.jsonl").read_text().splitlines()]
    assert [(row["index"], row["kind"], row["solution_str"]) for row in kept] == [
        (11, "error", "2"),
        (12, "abstain", "3"),
        (14, "abstain", "5"),
    ]


def test_beyond_the_limit_it_stops_with_the_samples_kept(tmp_path):
    def fn(solution_str, **_):
        return 1 / int(solution_str)

    manager = manager_of(fn, max_failure_rate=0.5)
    manager.failures.keep_in(tmp_path)
    assert manager(batch_of("1$", "0$")).meta_info["metrics"]["reward/failure_rate"] == 0.5
    with pytest.raises(RewardError, match=r"no score for 2 of 3 .*max_failure_rate=0.5.*sample 1.*samples are in"):
        manager(batch_of("1$", "0$", "0$"))
    assert len((tmp_path / "reward_failures.jsonl").read_text().splitlines()) == 3
    with pytest.raises(RewardError, match="no score for 2 of 2"):  # nothing is left to learn from
        manager_of(fn, max_failure_rate=1.0)(batch_of("0$", "0$"))


def test_check_tries_one_real_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "21=", "data_source": "exact_match", "reward_model": {"ground_truth": "12"}}\n')
    row = PromptDataset(str(file), TOKENIZER, max_prompt_length=4)[0]
    assert manager_of(default_compute_score).check(row, "here").score == 1.0
    with pytest.raises(RewardError, match=r"on rows.jsonl line 1, .*it returned None"):
        manager_of(lambda **_: None).check(row, "rows.jsonl line 1")
    with pytest.raises(RewardError, match="key 'reward_model', which is a column already"):
        manager_of(lambda **_: {"score": 1, "reward_model": 1}).check(row, "here")
    with pytest.raises(RewardError, match=r"data_source 'other'.*custom_reward_function.path"):
        manager_of(default_compute_score).check({**row, "data_source": "other"}, "here")
    tensors, objects = collate_prompts([row], PAD, 4)
    assert tensors["prompts"].shape == (1, 4) and objects["reward_model"][0] == {"ground_truth": "12"}


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
def test_placing_a_score_loses_none_and_hits_valid_tokens_only(mask):
    valid = torch.tensor(mask)
    scores = torch.arange(1, len(mask) + 1, dtype=torch.float32)
    placed = place_on_last_token(scores, valid)
    assert torch.equal(placed.sum(dim=1), torch.where(valid.any(dim=1), scores, 0.0))
    assert (placed[~valid] == 0).all()
