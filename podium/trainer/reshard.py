"""``podium reshard``: what moving weights from a trainer's layout to a rollout's costs, before anything is started."""

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from podium.models.megatron.parallel import MegatronLayout
from podium.utils.errors import UserError
from podium.workers.weight_sync.cost import Cost, Spread, broadcast_cost, gather_cost, plan_cost
from podium.workers.weight_sync.layouts import FSDPShards, Layout, MegatronShards, RolloutShards, rollout_ranks
from podium.workers.weight_sync.parameters import ModelShape
from podium.workers.weight_sync.plan import ReshardPlan

_EXAMPLE = "podium reshard --model config.json --train tp=8,pp=8,vpp=2,dp=2 --rollout tp=8,dp=16"
_PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def main(arguments: Sequence[str]) -> None:
    """Prints the cost of a change of layout."""
    options = _parser().parse_args(arguments)
    bandwidth = parse_bandwidth(options.bandwidth)
    model = ModelShape.load(options.model)
    report = compare(model, options.train, options.rollout)
    print(json.dumps(_as_json(report, bandwidth), indent=2) if options.json else _as_text(report, bandwidth))


@dataclasses.dataclass(frozen=True)
class Report:
    """Costs of one change of layout, for each way of making it."""

    model: ModelShape
    parameters: int
    bytes: int
    train: str
    train_ranks: int
    rollout: str
    rollout_ranks: int
    shared: bool
    """The rollout's ranks are the trainer's."""
    ways: dict[str, Cost]
    formula: tuple[float, float] | None
    """Volume and peak a rank, in bytes, of zero redundancy where the layouts nest."""


def compare(model: ModelShape, train: str, rollout: str) -> Report:
    """Plans and counts.

    Args:
        train: ``tp=2,pp=2,...`` (Megatron) or ``fsdp=16``.
        rollout: ``tp=2,dp=4`` and, for experts, ``ep=2``.

    Raises:
        UserError: sizes that do not go together, or with the model.
    """
    trainer = _train_layout(model, train)
    sizes = _sizes("--rollout", rollout, ("tp", "dp", "ep"))
    tp, dp, ep = (sizes.get(key, 1) for key in ("tp", "dp", "ep"))
    shared = tp * dp == trainer.world_size
    others = trainer.world_size + np.arange(tp * dp).reshape(dp, tp)
    ranks = rollout_ranks(trainer, tp, dp, ep) if shared else others
    sources, destinations = trainer.table(), RolloutShards(model, ranks, ep).table()
    parameters = list(model.parameters())
    ways = {
        "plan": plan_cost(ReshardPlan(sources, destinations), sources, destinations),
        "full gather": gather_cost(parameters, sources, destinations),
        "broadcast": broadcast_cost(parameters, destinations),
    }
    size = ways["full gather"].peak
    return Report(
        model=model,
        parameters=sum(parameter.numel for parameter in parameters),
        bytes=size,
        train=train,
        train_ranks=trainer.world_size,
        rollout=rollout,
        rollout_ranks=tp * dp,
        shared=shared,
        ways=ways,
        formula=_formula(trainer, tp, ep, size) if shared else None,
    )


def _train_layout(model: ModelShape, text: str) -> Layout:
    if "fsdp" in text:
        return FSDPShards(model, _sizes("--train", text, ("fsdp",))["fsdp"])
    layers = re.search(r"(?:^|,)layers=(\d+(?:\+\d+)*)(?=,|$)", text)
    rest = text.replace(layers[0], "", 1).lstrip(",") if layers else text
    sizes = _sizes("--train", rest, ("tp", "pp", "vpp", "dp", "cp", "ep"))
    tp, pp, vpp, cp, ep = (sizes.get(key, 1) for key in ("tp", "pp", "vpp", "cp", "ep"))
    stages = tuple(int(count) for count in layers[1].split("+")) if layers else ()
    layout = MegatronLayout(tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, stage_layers=stages)
    return MegatronShards(model, layout, sizes.get("dp", 1))


def _sizes(option: str, text: str, known: Sequence[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in known or key in sizes or not re.fullmatch(r"[1-9][0-9]*", value):
            raise UserError(
                f"{option} {text}: {part!r} is not KEY=SIZE with a size of at least 1 and one of the keys "
                f"{', '.join(known)}, each once"
            )
        sizes[key] = int(value)
    return sizes


def _formula(trainer: Layout, tp: int, ep: int, size: int) -> tuple[float, float] | None:
    """Volume and peak of HybridFlow's zero-redundancy change of layout (arXiv 2409.19256, table 2), p_g = 1."""
    if not isinstance(trainer, MegatronShards) or trainer.layout.tp % tp or ep > 1 or trainer.layout.ep > 1:
        return None
    held = trainer.layout.tp * trainer.layout.pp
    return (held - tp) / (tp * held) * size, size / tp


def parse_bandwidth(text: str) -> float:
    """Bytes a second of ``50GB/s``, ``400Gb/s`` or the like.

    Raises:
        UserError: it is written otherwise, or 0.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)([Bb])/s", text)
    if not match or not float(match[1]):
        raise UserError(f"--bandwidth {text}: expected a number and a unit, as in 50GB/s (bytes) or 400Gb/s (bits)")
    return float(match[1]) * _PREFIXES[match[2]] / (1 if match[3] == "B" else 8)


def _as_json(report: Report, bandwidth: float) -> dict[str, Any]:
    fields = {name: getattr(report, name) for name in ("train", "train_ranks", "rollout", "rollout_ranks", "shared")}
    ways = {
        name: {**dataclasses.asdict(cost), "seconds": cost.seconds(bandwidth)} for name, cost in report.ways.items()
    }
    return {
        "model_type": report.model.model_type,
        "dtype": report.model.dtype,
        "parameters": report.parameters,
        "bytes": report.bytes,
        **fields,
        "bandwidth": bandwidth,
        "ways": ways,
        "formula": dict(zip(("volume", "peak"), report.formula, strict=True)) if report.formula else None,
    }


def _as_text(report: Report, bandwidth: float) -> str:
    where = "the same" if report.shared else "others"
    lines = [
        f"model    {report.model.model_type}: {report.parameters:,} parameters, "
        f"{_size(report.bytes)} in {report.model.dtype}",
        f"train    {report.train}: {report.train_ranks} ranks",
        f"rollout  {report.rollout}: {report.rollout_ranks} ranks, {where}",
        "",
        f"{'bytes a rank':13}{'received: min':>14}{'mean':>10}{'max':>10}{'sent: min':>12}{'mean':>10}{'max':>10}"
        f"{'peak':>10}{'messages':>11}{'at least':>10}",
    ]
    for name, cost in report.ways.items():
        lines.append(
            f"{name:13}{_spread(cost.received, 14)}{_spread(cost.sent, 12)}{_size(cost.peak):>10}{cost.messages:>11,}"
            f"{_time(cost.seconds(bandwidth)):>10}"
        )
    if report.formula:
        volume, peak = report.formula
        lines.append(f"{'formula':13}{'':14}{_size(volume):>10}{'':42}{_size(peak):>10}")
    return "\n".join(lines)


def _spread(spread: Spread | None, width: int) -> str:
    if spread is None:
        return f"{'-':>{width}}{'-':>10}{'-':>10}"
    return f"{_size(spread.min):>{width}}{_size(spread.mean):>10}{_size(spread.max):>10}"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"podium reshard: {message}; for example: {_EXAMPLE}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="podium reshard", description=__doc__, epilog=f"example: {_EXAMPLE}", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a Hugging Face config.json, or the directory that has it")
    parser.add_argument(
        "--train",
        required=True,
        help="Megatron: tp=,pp=,vpp=,dp=,cp=,ep= (default 1) and, for uneven stages, layers=9+8+8+7; or fsdp=RANKS",
    )
    parser.add_argument("--rollout", required=True, help="tp=,dp= and, for experts spread over whole engines, ep=")
    parser.add_argument("--bandwidth", default="50GB/s", help="of each rank, each way (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON, sizes in bytes")
    return parser
