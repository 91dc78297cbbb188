"""main_eval on files with known scores."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podium.trainer.config import EvalConfig, check_eval_config, load_config
from podium.trainer.main_eval import evaluate
from podium.utils.errors import UserError

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str == "boom":
        raise RuntimeError("no score")
    return float(solution_str == ground_truth) + bonus
"""


def write(path: Path, *rows: tuple[str, str, list[str]]) -> Path:
    table = [
        {"data_source": source, "reward_model": {"ground_truth": truth}, "responses": responses}
        for source, truth, responses in rows
    ]
    pq.write_table(pa.Table.from_pylist(table), path)
    return path


def run(tmp_path: Path, data: Path, *extra: str) -> dict[str, dict[str, float]]:
    (tmp_path / "reward.py").write_text(REWARD)
    argv = [f"data.path={data}", f"custom_reward_function.path={tmp_path / 'reward.py'}", *extra]
    config, explicit = load_config(EvalConfig, argv)
    check_eval_config(config, explicit)
    return evaluate(config)


def test_by_data_source_and_together(tmp_path, capsys):
    data = write(
        tmp_path / "gen.parquet",
        ("a", "1", ["1", "1", "2", "2"]),
        ("a", "1", ["2", "2", "2", "2"]),
        ("b", "x", ["x", "x", "x", "x"]),
    )
    output = tmp_path / "scores" / "out.parquet"
    result = run(tmp_path, data, f"data.output_path={output}")
    assert result["a"] == {
        "prompts": 2,
        "responses": 8,
        "failed": 0,
        "score": 0.25,
        "best": 0.5,
        "pass@1": pytest.approx(0.25),
        "pass@2": pytest.approx((1 - 1 / 6) / 2),
        "pass@4": 0.5,
    }
    assert result["b"]["pass@1"] == 1.0 and result["all"]["score"] == pytest.approx(0.5)
    assert [row["scores"] for row in pq.read_table(output).to_pylist()] == [[1, 1, 0, 0], [0] * 4, [1] * 4]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-4].split() == [
        "data",
        "source",
        "prompts",
        "responses",
        "failed",
        "score",
        "best",
        "pass@1",
        "pass@2",
        "pass@4",
    ]
    assert lines[-1].split() == ["all", "3", "12", "0", "0.5000", "0.6667", "0.5000", "0.6111", "0.6667"]


def test_failures_are_counted_not_scored_zero(tmp_path):
    data = write(tmp_path / "gen.parquet", ("a", "1", ["1", "boom"]), ("a", "1", ["1", "1"]))
    result = run(tmp_path, data)
    assert result["a"]["failed"] == 1 and result["a"]["score"] == 1.0 and result["a"]["pass@2"] == 1.0
    with pytest.raises(UserError, match=r"1 of 4 responses have no score, more than max_failure_rate=0.2; .*no score"):
        run(tmp_path, data, "max_failure_rate=0.2")


def test_thresholds_ks_and_arguments(tmp_path):
    data = write(tmp_path / "gen.parquet", ("a", "1", ["1", "2", "2"]))
    result = run(tmp_path, data, "pass_threshold=1.5", "+custom_reward_function.reward_kwargs.bonus=0.5", "pass_k=[3]")
    assert result["a"]["pass@3"] == 1.0 and "pass@1" not in result["a"] and result["a"]["best"] == 1.5
    with pytest.raises(UserError, match=r"pass_k=\[0\]: expected numbers of at least 1"):
        run(tmp_path, data, "pass_k=[0]")


def test_bad_files(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"responses": 3}\n')
    with pytest.raises(UserError, match=r"x.jsonl line 1: column 'responses' is no string and no list of strings"):
        run(tmp_path, file)
    file.write_text('{"responses": []}\n')
    with pytest.raises(UserError, match=r"no row has a response in 'responses'"):
        run(tmp_path, file)
    with pytest.raises(UserError, match=r"no column 'answers' \(data.response_key\)"):
        run(tmp_path, file, "data.response_key=answers")
