"""Scores of responses in a file: ``python3 -m podium.trainer.main_eval key=value ...`` (``--help`` lists the keys)."""

from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

from podium.trainer.cli import run_main
from podium.trainer.config import EvalConfig, check_eval_config, parse_command_line
from podium.utils.errors import UserError

Scores = list[list[float | None]]


def main() -> None:
    """Reads the command line and scores."""
    config, explicit = parse_command_line(EvalConfig, "python3 -m podium.trainer.main_eval")
    check_eval_config(config, explicit)
    evaluate(config)


def evaluate(config: EvalConfig) -> dict[str, dict[str, float]]:
    """Scores every response and prints a table by data source.

    Returns:
        By data source, and ``all`` together where there are several: ``prompts``, ``responses``, ``failed``, ``score``,
        ``best`` (mean of each prompt's best) and ``pass@k``.

    Raises:
        UserError: bad input, or more responses without a score than ``max_failure_rate``.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from podium.utils.data_files import RowReader
    from podium.workers.reward.build import build_scorer

    rows = RowReader(config.data.path, key="data.path")
    rows.require(config.data.response_key, "data.response_key")
    table = [rows[i] for i in range(len(rows))]
    requests = [_requests(row, rows.where(i), config.data.response_key) for i, row in enumerate(table)]
    flat = [request for of_row in requests for request in of_row]
    if not flat:
        raise UserError(f"data.path={', '.join(rows.files)}: no row has a response in '{config.data.response_key}'")
    with closing(build_scorer(config.reward_model, config.custom_reward_function)) as scorer:
        outcomes = scorer(flat)
    failed = [outcome for outcome in outcomes if outcome.kind != "score"]
    if failed:
        print(f"{len(failed)} of {len(flat)} responses have no score; the first: {failed[0].kind}, {failed[0].reason}")
    if len(failed) > config.max_failure_rate * len(flat):
        raise UserError(
            f"{len(failed)} of {len(flat)} responses have no score, more than max_failure_rate="
            f"{config.max_failure_rate}; the first: {failed[0].reason}"
        )
    values = iter(outcome.score for outcome in outcomes)
    scores: Scores = [[next(values) for _ in of_row] for of_row in requests]
    if config.data.output_path:
        target = Path(config.data.output_path).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.Table.from_pylist([{**row, "scores": of_row} for row, of_row in zip(table, scores, strict=True)]), target
        )
    result = _by_source([str(row.get("data_source") or "unknown") for row in table], scores, config)
    _print(result)
    return result


def _requests(row: dict[str, Any], where: str, key: str) -> list[Any]:
    from podium.workers.reward.outcome import ScoreRequest

    responses = [row[key]] if isinstance(row[key], str) else row[key]
    if not isinstance(responses, list) or not all(isinstance(text, str) for text in responses):
        raise UserError(f"{where}: column '{key}' is no string and no list of strings")
    finished = row.get("finished") or [True] * len(responses)
    model = row.get("reward_model")
    return [
        ScoreRequest(
            data_source=row.get("data_source") or "unknown",
            solution_str=text,
            ground_truth=model.get("ground_truth") if isinstance(model, dict) else None,
            extra_info={**(row.get("extra_info") or {}), "response_finished": bool(done)},
        )
        for text, done in zip(responses, finished, strict=True)
    ]


def _by_source(sources: list[str], scores: Scores, config: EvalConfig) -> dict[str, dict[str, float]]:
    groups: dict[str, Scores] = defaultdict(list)
    for source, of_row in zip(sources, scores, strict=True):
        groups[source].append(of_row)
    result = {source: _summary(of_source, config) for source, of_source in groups.items()}
    if len(groups) > 1:
        result["all"] = _summary(scores, config)
    return result


def _summary(scores: Scores, config: EvalConfig) -> dict[str, float]:
    from podium.trainer.generation.passk import default_ks, mean_pass_at_k

    kept = [[score for score in of_row if score is not None] for of_row in scores]
    flat = [score for of_row in kept for score in of_row]
    responses = sum(map(len, scores))
    summary: dict[str, float] = {
        "prompts": len(scores),
        "responses": responses,
        "failed": responses - len(flat),
    }
    if flat:
        best = [max(of_row) for of_row in kept if of_row]
        summary.update(score=sum(flat) / len(flat), best=sum(best) / len(best))
    counts = [(len(of_row), sum(score >= config.pass_threshold for score in of_row)) for of_row in kept]
    for k in config.pass_k or default_ks(max(map(len, scores))):
        value = mean_pass_at_k(counts, k)
        if value is not None:
            summary[f"pass@{k}"] = value
    return summary


def _print(result: dict[str, dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for summary in result.values() for name in summary))
    width = max(len("data source"), *map(len, result))
    print("  ".join([f"{'data source':<{width}}", *(f"{name:>9}" for name in names)]))
    for source, summary in result.items():
        cells = ["" if name not in summary else _cell(summary[name]) for name in names]
        print("  ".join([f"{source:<{width}}", *(f"{cell:>9}" for cell in cells)]))


def _cell(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4f}"


if __name__ == "__main__":
    run_main(main)
