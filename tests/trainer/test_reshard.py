"""The command ``podium reshard``."""

import json
import subprocess
import sys

import pytest

from podium.trainer.reshard import main, parse_bandwidth
from podium.utils.errors import UserError

# Llama 3.1 8B's.
CONFIG = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
SIZES = ["--train", "tp=8,pp=8,vpp=2,dp=2", "--rollout", "tp=8,dp=16"]
PRINTED = """\
model    llama: 8,030,261,248 parameters, 16.06 GB in bfloat16
train    tp=8,pp=8,vpp=2,dp=2: 128 ranks
rollout  tp=8,dp=16: 128 ranks, the same

bytes a rank  received: min      mean       max   sent: min      mean       max      peak   messages  at least
plan               1.659 GB  1.757 GB   1.79 GB    1.527 GB  1.757 GB  2.447 GB  2.008 GB        896   48.9 ms
full gather        15.71 GB  15.81 GB  15.84 GB           -         -         -  16.06 GB        291    317 ms
broadcast          16.06 GB  16.06 GB  16.06 GB           -         -         -  3.059 GB        291    321 ms
formula                      1.757 GB                                            2.008 GB
"""


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_the_cost_is_printed_beside_those_of_the_ways_without_a_plan(model, capsys):
    main(["--model", model, *SIZES])
    assert capsys.readouterr().out == PRINTED


def test_json_has_the_same_in_bytes_and_seconds(model, capsys):
    main(["--model", f"{model}/config.json", *SIZES, "--bandwidth", "400Gb/s", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["bandwidth"] == 50e9
    assert report["bytes"] == report["parameters"] * 2 == report["ways"]["full gather"]["peak"]
    plan = report["ways"]["plan"]
    assert plan["seconds"] == max(plan["received"]["max"], plan["sent"]["max"]) / 50e9
    assert plan["received"]["mean"] == pytest.approx(report["formula"]["volume"], rel=1e-3)  # but for the norms
    assert plan["peak"] == pytest.approx(report["formula"]["peak"], rel=1e-3)


@pytest.mark.parametrize(
    ("train", "rollout", "ranks", "shared"),
    [
        ("fsdp=16", "tp=4,dp=4", 16, True),
        ("fsdp=16", "tp=4", 16, False),
        ("pp=4,layers=9+8+8+7", "tp=1,dp=4", 4, True),
        ("layers=9+8+8+7,tp=2,pp=2,vpp=2,cp=2", "tp=2", 8, False),
    ],
)
def test_layouts_are_read(model, capsys, train, rollout, ranks, shared):
    main(["--model", model, "--train", train, "--rollout", rollout, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["train_ranks"], report["shared"]) == (ranks, shared)
    assert (report["formula"] is not None) == (shared and "fsdp" not in train)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["--train", "tp=2,xp=1"],
            "--train tp=2,xp=1: 'xp=1' is not KEY=SIZE with a size of at least 1 and one of the",
        ),
        (["--train", "tp=2,tp=2"], "'tp=2' is not"),
        (["--train", "fsdp=4,tp=2"], "'tp=2' is not"),
        (["--train", "pp=2,layers=9+8"], "pipeline_stage_layers=[9, 8] are 17 layers and the model has 32"),
        (["--train", "pp=2,layers=9-8"], "'layers=9-8' is not"),
        (["--rollout", "tp=0"], "--rollout tp=0: 'tp=0' is not"),
        (["--rollout", "tp=3"], "does not divide by 3"),
        (["--rollout", "tp=2,ep=2"], "--rollout ep=2 has no effect: the model has no experts"),
        (["--bandwidth", "50"], "--bandwidth 50: expected a number and a unit, as in 50GB/s (bytes) or 400Gb/s (bits)"),
        (["--model", "nowhere"], "--model nowhere: nowhere does not open"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_bad_input_is_named(model, changes, message):
    with pytest.raises(UserError) as error:
        main(["--model", model, *SIZES, *changes])
    assert message in str(error.value)


def test_bandwidths_are_in_bytes_or_bits():
    assert parse_bandwidth("50GB/s") == 50e9
    assert parse_bandwidth("400Gb/s") == 50e9
    assert parse_bandwidth("1.5TB/s") == 1.5e12
    with pytest.raises(UserError):
        parse_bandwidth("0GB/s")


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_a_trillion_parameters_on_16384_ranks_in_ten_seconds_and_two_gigabytes(tmp_path, experts):
    """Of processor time, so that what else the machine does makes no difference; imports and all."""
    big = {
        **CONFIG,
        "hidden_size": 25600,
        "intermediate_size": 84480,
        "num_hidden_layers": 128,
        "num_attention_heads": 200,
        "head_dim": 128,
    }
    train, rollout = "tp=8,pp=32,vpp=2,dp=64", "tp=8,dp=2048"
    if experts:
        big |= {"model_type": "qwen3_moe", "hidden_size": 7168, "num_hidden_layers": 64, "num_attention_heads": 64}
        big |= {"intermediate_size": 18432, "num_experts": 384, "moe_intermediate_size": 2048}
        train, rollout = "tp=8,pp=16,dp=128,ep=32", "tp=8,dp=2048,ep=64"
    (tmp_path / "config.json").write_text(json.dumps(big))
    code = (
        "import json, resource, sys; from podium.trainer.reshard import main; main(sys.argv[1:]); "
        "used = resource.getrusage(resource.RUSAGE_SELF); "
        "print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]), file=sys.stderr)"
    )
    arguments = ["--model", str(tmp_path), "--train", train, "--rollout", rollout, "--json"]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["parameters"] > 1e12
    assert report["train_ranks"] == report["rollout_ranks"] == 16384
    seconds, peak = json.loads(result.stderr)
    print(f"{report['parameters']:.4g} parameters: {seconds:.1f} s, {peak / 1e9:.2f} GB")
    assert seconds < 10
    assert peak < 2e9
