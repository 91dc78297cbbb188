"""What a process that dies, a bit that flips, a version that is missed and a full memory do to a sync: an error that
names them within the deadline, no half-new weights, and a next sync that works."""

import time
from collections.abc import Iterator

import pytest

from tests.workers.weight_sync.transport.stage import Stage

DEADLINE_S = 10.0
APART = ("ipc", "cpu", "sharded", "broadcast")
TOGETHER = ("colocated", "memory_buffer")
COMPLETE_FIRST = ("cpu",)
"""Transports in which a version is complete and compared before the first byte is written to an engine."""


@pytest.fixture(scope="module")
def stages(model_dirs: dict[str, str]) -> Iterator[dict[str, Stage]]:
    """By transport: two trainers, and two engines in processes of their own or in the trainers'."""
    stages: dict[str, Stage] = {}
    yield stages
    for stage in stages.values():
        stage.close()


@pytest.fixture(params=[*APART, *TOGETHER])
def stage(request: pytest.FixtureRequest, stages: dict[str, Stage], model_dirs: dict[str, str]) -> Iterator[Stage]:
    """Connected, and with a version that every engine holds; at the end, whatever happened, the next sync works."""
    name = request.param
    if name not in stages:
        is_pipeline = name == "memory_buffer"
        stages[name] = Stage(model_dirs["qwen2"], 2, 2, colocated=name in TOGETHER, pipeline=is_pipeline)
    stage = stages[name]
    stage.connect(name, timeout_s=DEADLINE_S)
    stage.synced(stage.next_version)
    yield stage
    stage.restart_the_dead()
    stage.connect(name, timeout_s=DEADLINE_S)
    stage.synced(stage.next_version)


@pytest.fixture
def is_complete_first(stage: Stage) -> bool:
    return stage.transport in COMPLETE_FIRST


def test_a_sender_is_killed(stage: Stage, is_complete_first: bool):
    old, new = stage.version, stage.next_version
    stage.remotes[1]("die_when", "sends")
    began = time.monotonic()
    outcome = stage.sync(new)
    assert time.monotonic() - began < DEADLINE_S + 5
    living = {remote.args[0] for remote in stage.engines} - {"actor rank 1"}
    assert outcome.dead == ["actor rank 1"] and set(outcome.errors) >= living
    outcome.assert_named(new)
    stage.assert_whole_or_refused(old, outcome, whole=is_complete_first)


@pytest.mark.slow
def test_a_receiver_is_killed(stage: Stage):
    old, new = stage.version, stage.next_version
    stage.engines[1]("die_when", "receives")
    began = time.monotonic()
    outcome = stage.sync(new)
    assert time.monotonic() - began < DEADLINE_S + 5
    assert outcome.dead == [stage.engines[1].args[0]]
    outcome.assert_named(new)
    if stage.engines[0].args[0] in outcome.errors:
        stage.assert_whole_or_refused(old, outcome, whole=False)
    else:  # it needs nothing from the one that died
        assert stage.engines[0]("held")[0] == new


@pytest.mark.slow
def test_a_bit_flips(stage: Stage, is_complete_first: bool):
    old, new = stage.version, stage.next_version
    stage.remotes[0]("flip_a_bit")
    outcome = stage.sync(new)
    outcome.assert_named(new)
    failed = [outcome.errors.get(remote.args[0], "") for remote in stage.engines]
    assert any("verification: " in error and ("model." in error or "the stage of actor" in error) for error in failed)
    stage.assert_whole_or_refused(old, outcome, whole=is_complete_first)


@pytest.mark.slow
def test_a_version_is_skipped(stage: Stage):
    stage.synced(stage.version + 3)


@pytest.mark.slow
def test_another_version_than_was_asked_for(stage: Stage):
    old, new = stage.version, stage.next_version
    outcome = stage.sync(new, received_as=new + 1)
    outcome.assert_named(new, new + 1)
    assert set(outcome.errors) >= {stage.engines[-1].args[0]}
    stage.assert_whole_or_refused(old, outcome, whole=True)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["cpu"], indirect=True)  # the others allocate none for a version
def test_shared_memory_is_full(stage: Stage):
    old, new = stage.version, stage.next_version
    sources = stage.remotes[:2]
    for remote in sources:
        remote("limit_files", 1000)
    outcome = stage.sync(new)
    for remote in sources:
        remote("limit_files", -1)
    outcome.assert_named(new)
    assert all("no room for version" in outcome.errors[remote.args[0]] for remote in sources)
    stage.assert_whole_or_refused(old, outcome, whole=True)
