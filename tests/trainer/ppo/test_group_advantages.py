"""Golden values of the group estimators, each against a plain loop over groups and rows."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from podium.trainer.ppo.group_advantages import group_ids
from podium.utils.errors import UserError
from tests.trainer.ppo import ragged
from tests.trainer.ppo.test_advantages import assert_close, whitened


def outcomes(inputs):
    """Score and length of each row, and the rows of each group that are not empty."""
    mask = inputs["response_mask"].tolist()
    rewards = inputs["token_level_rewards"].tolist()
    scores = [sum(r for r, ok in zip(row, valid, strict=True) if ok) for row, valid in zip(rewards, mask, strict=True)]
    lengths = [sum(valid) for valid in mask]
    groups = defaultdict(list)
    for row, name in enumerate(inputs["index"]):
        if lengths[row]:
            groups[name].append(row)
    return scores, lengths, groups


def mean(numbers):
    return sum(numbers) / len(numbers)


def std(numbers):
    return math.sqrt(sum((x - mean(numbers)) ** 2 for x in numbers) / (len(numbers) - 1)) if len(numbers) > 1 else 0.0


def by_group(inputs, rule):
    """Applies ``rule(scores, lengths) -> advantages`` to each group and spreads the result over tokens."""
    scores, lengths, groups = outcomes(inputs)
    row_advantage = [0.0] * len(scores)
    for rows in groups.values():
        got = rule([scores[row] for row in rows], [lengths[row] for row in rows])
        for row, value in zip(rows, got, strict=True):
            row_advantage[row] = value
    return [
        [row_advantage[row] if ok else 0.0 for ok in valid]
        for row, valid in enumerate(inputs["response_mask"].tolist())
    ]


def grpo(scores, _):
    return [(s - mean(scores)) / (std(scores) + 1e-6) for s in scores]


def dr_grpo(scores, _):
    return [s - mean(scores) for s in scores]


def rloo(scores, _):
    if len(scores) == 1:
        return [0.0]
    return [s - (sum(scores) - s) / (len(scores) - 1) for s in scores]


def opo(scores, lengths):
    baseline = sum(s * n for s, n in zip(scores, lengths, strict=True)) / sum(lengths)
    return [s - baseline for s in scores]


def passk(scores, _):
    if len(scores) == 1:
        return [0.0]
    best, second = sorted(scores, reverse=True)[:2]
    return [(best - second) / (std(scores) + 1e-6) if s == best else 0.0 for s in scores]


@pytest.mark.parametrize(
    ("name", "rule"), [("grpo", grpo), ("rloo", rloo), ("opo", opo), ("grpo_passk", passk)], ids=lambda x: str(x)
)
def test_golden(name, rule):
    inputs = ragged.batch()
    advantage, returns = ragged.estimate(name, inputs)
    assert_close(advantage, by_group(inputs, rule))
    assert torch.equal(advantage, returns)


def test_dr_grpo_leaves_out_the_division():
    inputs = ragged.batch() | {"norm_adv_by_std_in_grpo": False}
    assert_close(ragged.estimate("grpo", inputs)[0], by_group(inputs, dr_grpo))


def test_reinforce_plus_plus_baseline_whitens_over_tokens():
    inputs = ragged.batch()
    expected = whitened(by_group(inputs, dr_grpo), inputs["response_mask"])
    assert_close(ragged.estimate("reinforce_plus_plus_baseline", inputs)[0], expected)


def test_gpg_scales_by_the_share_of_responses_that_teach():
    inputs = ragged.batch()
    _, lengths, groups = outcomes(inputs)
    rows = groups["c"]  # give this group equal scores
    inputs["token_level_rewards"][rows] = 0.0
    for row in rows:
        last = inputs["response_mask"][row].nonzero().max()
        inputs["token_level_rewards"][row, last] = 0.7
    filled = sum(1 for n in lengths if n)
    teaching = sum(len(rows) for name, rows in groups.items() if name not in ("c", "alone") and len(rows) > 1)
    expected = torch.tensor(by_group(inputs, dr_grpo), dtype=torch.float64) * filled / teaching
    torch.testing.assert_close(ragged.estimate("gpg", inputs)[0], expected, rtol=1e-9, atol=1e-9)


def test_gdpo_normalises_each_component_before_adding():
    inputs = ragged.batch()
    total = torch.zeros(ragged.ROWS, ragged.WIDTH, dtype=torch.float64)
    for key, weight in (("accuracy", 1.0), ("format", 0.5)):
        rewards = torch.zeros_like(total)
        for row, valid in enumerate(inputs["response_mask"]):
            if valid.any():
                rewards[row, valid.nonzero().max()] = float(inputs["non_tensor_batch"][key][row])
        part = by_group(inputs | {"token_level_rewards": rewards}, grpo)
        total += weight * torch.tensor(part, dtype=torch.float64)
    assert_close(ragged.estimate("gdpo", inputs)[0], whitened(total.tolist(), inputs["response_mask"]))


def test_gdpo_names_a_component_that_is_not_there():
    inputs = ragged.batch()
    inputs["config"].gdpo_reward_keys = ["acuracy", "format"]
    with pytest.raises(UserError, match="did you mean 'accuracy'"):
        ragged.estimate("gdpo", inputs)
    inputs["config"].gdpo_reward_keys = None
    with pytest.raises(UserError, match="gdpo_reward_keys is empty"):
        ragged.estimate("gdpo", inputs)


def loop_token_baseline(inputs, weights=None):
    mask, rewards = inputs["response_mask"].tolist(), inputs["token_level_rewards"].tolist()
    togo = [[sum(row[t:]) if mask[i][t] else 0.0 for t in range(len(row))] for i, row in enumerate(rewards)]
    energy = []
    for i, valid in enumerate(mask):
        running, row = 0.0, []
        for t, ok in enumerate(valid):
            if ok:
                step = 1 - 2 * math.exp(inputs["old_log_probs"][i, t]) + inputs["sum_pi_squared"][i, t].item()
                running += step * (1.0 if weights is None else weights[i, t].item() ** 2)
            row.append(running)
        energy.append(row)
    end = [max((t + 1 for t, ok in enumerate(valid) if ok), default=0) for valid in mask]
    _, _, groups = outcomes(inputs)
    advantage = [[0.0] * len(row) for row in mask]
    for rows in groups.values():
        if len(rows) == 1:
            continue
        ends = sorted((end[row] for row in rows), reverse=True)
        for t in range(ends[0]):
            running = [row for row in rows if mask[row][t]]
            total = sum(energy[row][t] for row in running) + 1e-6
            baseline = sum(togo[row][t] * energy[row][t] for row in running) / total
            for row in running:
                alone = end[row] == ends[0] and ends[0] > ends[1] and t >= ends[1]
                advantage[row][t] = togo[row][t] - (0.0 if alone else baseline)
    return advantage, togo


@pytest.mark.parametrize("weighted", [False, True])
def test_optimal_token_baseline(weighted):
    inputs = ragged.batch()
    if weighted:
        inputs["rollout_is_weights"] = torch.rand(ragged.ROWS, ragged.WIDTH, dtype=torch.float64) * 2
    expected, togo = loop_token_baseline(inputs, inputs.get("rollout_is_weights"))
    advantage, returns = ragged.estimate("optimal_token_baseline", inputs)
    assert_close(advantage, expected)
    assert_close(returns, togo)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "optimal_token_baseline"])
def test_a_group_of_one_has_advantage_zero(name):
    advantage, _ = ragged.estimate(name, ragged.batch())
    alone = ragged.GROUPS.index("alone")
    one_left = 1  # its only partner is the empty response
    assert bool((advantage[[alone, one_left]] == 0).all())


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_equal_scores_give_exactly_nothing(name):
    inputs = ragged.batch(dtype=torch.float32)
    mask = inputs["response_mask"]
    inputs["token_level_rewards"] = torch.zeros_like(inputs["token_level_rewards"])
    for row, valid in enumerate(mask):
        if valid.any():
            inputs["token_level_rewards"][row, valid.nonzero().max()] = 0.1
    assert ragged.estimate(name, inputs)[0].abs().max() < 1e-9


def test_index_may_be_a_tensor_or_numbers_or_names():
    expected, count = group_ids(np.array(ragged.GROUPS, dtype=object))
    numbers = [sorted(set(ragged.GROUPS)).index(name) for name in ragged.GROUPS]
    for index in (torch.tensor(numbers), np.array(numbers), np.array(ragged.GROUPS)):
        ids, groups = group_ids(index)
        assert torch.equal(ids, expected) and groups == count == 4


def test_an_index_of_the_wrong_length_is_refused():
    with pytest.raises(UserError, match="9 rows"):
        ragged.estimate("grpo", ragged.batch() | {"index": np.arange(9)})
