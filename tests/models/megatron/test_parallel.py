"""Layouts: which go together, and what they come to."""

import ast
import subprocess
import sys
from types import SimpleNamespace

import pytest

from podium.models.megatron.parallel import MegatronLayout
from podium.utils.errors import UserError


def test_data_parallel_takes_the_ranks_that_are_left():
    assert MegatronLayout().dp(6) == 6
    assert MegatronLayout(tp=2, pp=3, cp=2).dp(24) == 2
    assert MegatronLayout(tp=2, ep=4).dp(8) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "tensor_model_parallel_size=0: expected a whole number of at least 1"),
        ({"ep": 1.5}, "expert_model_parallel_size=1.5"),
        ({"vpp": 2}, "virtual_pipeline_model_parallel_size=2 has no effect with pipeline_model_parallel_size=1"),
        ({"sequence_parallel": True}, "sequence_parallel=true has no effect with tensor_model_parallel_size=1"),
        ({"pp": 2, "stage_layers": (4,)}, r"pipeline_stage_layers=\[4\]: expected 2 numbers"),
        ({"pp": 2, "stage_layers": (4, 0)}, "each stage needs at least one layer"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused_by_their_key(fields: dict, message: str):
    with pytest.raises(UserError, match=message):
        MegatronLayout(**fields)


@pytest.mark.parametrize(
    ("layout", "ranks", "message"),
    [
        (MegatronLayout(tp=2, pp=2), 6, "6 ranks do not divide by tensor_model_parallel_size x"),
        (MegatronLayout(ep=4), 6, "expert_model_parallel_size=4: the 6 ranks of a pipeline stage do not divide"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(layout: MegatronLayout, ranks: int, message: str):
    with pytest.raises(UserError, match=message):
        layout.dp(ranks)


def test_layers_of_stages():
    assert MegatronLayout(pp=2, vpp=2).layers_by_stage(8) == (2, 2, 2, 2)
    assert MegatronLayout(pp=3, stage_layers=(1, 3, 2)).layers_by_stage(6) == (1, 3, 2)
    with pytest.raises(UserError, match=r"the model's 5 layers do not divide by it; give .* pipeline_stage_layers"):
        MegatronLayout(pp=2).layers_by_stage(5)
    with pytest.raises(UserError, match="are 5 layers and the model has 6"):
        MegatronLayout(pp=2, stage_layers=(1, 4)).layers_by_stage(6)


def test_it_is_read_from_a_configuration_by_its_keys():
    config = SimpleNamespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=None,
        sequence_parallel=True,
        pipeline_stage_layers=[3, 5],
    )
    layout = MegatronLayout.from_config(config)
    assert layout == MegatronLayout(tp=2, pp=2, sequence_parallel=True, stage_layers=(3, 5))
    assert str(layout) == "tp2 pp2 sp layers 3+5"
    assert str(MegatronLayout()) == "tp1"


def test_planning_imports_neither_torch_nor_megatron():
    code = """
import sys
import podium.models.megatron.parallel
print([name for name in ("torch", "megatron") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_layouts_that_follow_one_another_leave_no_groups_and_no_threads_behind():
    program = """
import os
from podium.models.megatron import parallel

def threads():
    return len(os.listdir("/proc/self/task"))

counts = []
for _ in range(3):
    parallel.initialize(parallel.MegatronLayout())
    busy = threads()
    parallel.destroy()
    counts.append((busy, threads()))
print(counts)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    counts = ast.literal_eval(done.stdout.splitlines()[-1])
    assert counts[0] == counts[1] == counts[2] and counts[0][0] > counts[0][1] + 10
