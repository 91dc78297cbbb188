"""The driver's side of the weight sync: who is connected with whom, one call a version, and the ledger."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from podium.protocol import WorkerGroup
from podium.trainer.config.rollout import WeightSyncConfig
from podium.trainer.plugins import PluggedName
from podium.utils.tracking import Tracking
from podium.workers.weight_sync.groups import connect_groups, sync_groups
from podium.workers.weight_sync.transport.base import SyncReport, SyncSettings


class WeightSync:
    """Moves the actor's weights to the rollout.

    Args:
        plugins: what may register a weight buffer that the configuration names.
        rollout: None where every rank of the actor has the rollout in its process.
    """

    def __init__(
        self,
        config: WeightSyncConfig,
        plugins: Sequence[str],
        actor: WorkerGroup,
        rollout: WorkerGroup | None,
        tracking: Tracking,
    ):
        self._config, self._tracking = config, tracking
        self._requested = PluggedName(config.transport, plugins)
        self._groups = [actor] if rollout is None else [actor, rollout]
        self._transport = ""
        self._is_connected = False
        self._last = -1

    def __call__(self, newer_than: int, step: int) -> tuple[int, dict[str, Any]]:
        """Sends the weights as the next version, by one call to each process.

        Args:
            newer_than: a version; the new one is larger, and larger than any that was tried.
            step: for the ledger, ``weight_sync.jsonl``.

        Returns:
            The version, and metrics.

        Raises:
            WorkerError: it failed; the next call connects anew.
        """
        if not self._is_connected:
            self._connect()
        self._last = version = max(newer_than, self._last) + 1
        self._is_connected = False
        began = time.perf_counter()
        reports = sync_groups(self._groups, version)
        pause = time.perf_counter() - began
        self._is_connected = True
        row = ledger_row(reports, pause)
        self._tracking.record("weight_sync", row, step)
        return version, {
            **{f"weight_sync/{name}": row[name] for name in ("version", "messages", "bytes", "verified_buckets")},
            "perf/weight_sync_gb_per_s": row["gb_per_s"],
            "perf/weight_sync_share_of_bound": row["share_of_bound"],
            "perf/weight_sync_verify_s": row["verify_seconds"],
            "perf/weight_sync_pause_s": pause,
        }

    def reconnect(self) -> None:
        """Has the next call connect anew: an end has been replaced."""
        self._is_connected = False

    def _connect(self) -> None:
        config = self._config
        settings = SyncSettings(config.verify, config.bucket_megabytes << 20, config.timeout_s)
        transport = connect_groups(self._groups, self._requested, settings)
        if transport != self._transport:
            print(f"weight sync by transport {transport} (weight_sync.transport={config.transport})", flush=True)
        self._transport = transport


def ledger_row(reports: list[SyncReport], pause_s: float) -> dict[str, Any]:
    """One sync in one line, from what each process says of it.

    Args:
        pause_s: how long the rollout could not generate, as the driver saw it.
    """
    counts = [dataclasses.asdict(report) for report in reports]
    total = {name: sum(count[name] for count in counts) for name in ("bytes_sent", "bytes_received", "bytes_local")}
    seconds = max(report.seconds for report in reports)
    bound = max(report.bound_seconds for report in reports)
    delivered = total["bytes_received"] + total["bytes_local"]
    return {
        "version": reports[0].version,
        "transport": reports[0].transport,
        "messages": 1,  # control messages to each process
        "bytes": delivered,
        **total,
        "buckets": sum(report.buckets for report in reports),
        "seconds": seconds,
        "gb_per_s": delivered / seconds / 1e9,
        "bound_seconds": bound,
        "share_of_bound": bound / seconds,
        "verified_buckets": sum(report.verified_buckets for report in reports),
        "verify_seconds": max(report.verify_seconds for report in reports),
        "pause_seconds": pause_s,
    }
