"""Processes for tests: forked from one that has imported what they need, which is what takes time."""

import multiprocessing

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["tests.workers.weight_sync.snapshot_processes", "tests.workers.weight_sync.transport.stage"]
)
