"""The parts of scripts/setup.py that decide; what they decide is run by every `make test` in a fresh clone."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "setup.py"
KNOWN = ["cpu", "dev", "vllm", "wandb"]
CPU_MACHINE = ("cpu", "no NVIDIA device, and no nvidia-smi")


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("podium_setup", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load_script()


def fake_nvidia_smi(folder: Path, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_a_device_file_means_the_cuda_build(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert setup.find_build(tmp_path) == ("vllm", "found nvidia0, nvidia1")


@pytest.mark.parametrize(
    ("script", "build", "reason"),
    [
        ("echo 'GPU 0: NVIDIA A100 (UUID: GPU-1)'", "vllm", "nvidia-smi lists GPU 0: NVIDIA A100"),
        ("echo 'No devices were found'", "cpu", "nvidia-smi finds no GPU"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "cpu", "nvidia-smi finds no GPU"),
    ],
)
def test_without_device_files_nvidia_smi_decides(tmp_path, monkeypatch, script, build, reason):
    fake_nvidia_smi(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert setup.find_build(tmp_path) == (build, reason)


def test_without_either_the_cpu_build(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.find_build(tmp_path) == CPU_MACHINE


def test_the_machine_chooses_the_build_and_the_user_may_overrule_it():
    assert setup.choose_extras(["wandb", "dev"], KNOWN, CPU_MACHINE) == (["cpu", "dev", "wandb"], CPU_MACHINE[1])
    assert setup.choose_extras([], KNOWN, ("vllm", "found nvidia0")) == (["vllm"], "found nvidia0")
    assert setup.choose_extras(["dev", "vllm"], KNOWN, CPU_MACHINE) == (["vllm", "dev"], "as asked")


@pytest.mark.parametrize(("requested", "words"), [(["devel"], "devel; there are: cpu, dev"), (["cpu", "vllm"], "one")])
def test_extras_that_make_no_sense_are_named(requested, words):
    with pytest.raises(setup.SetupError, match=words):
        setup.choose_extras(requested, KNOWN, CPU_MACHINE)


@pytest.fixture
def project(tmp_path):
    """A folder with the two files that a stamp is about."""
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_stamp_covers_its_extras_and_fewer_but_not_more(project, tmp_path):
    mark = setup.fingerprint(project, "3.11.7")
    path = tmp_path / "stamp.json"
    path.write_text(json.dumps({"fingerprint": mark, "extras": ["cpu", "dev", "wandb"]}))
    stamp = setup.read_stamp(path)
    assert setup.is_current(stamp, mark, ["cpu", "dev"])
    assert not setup.is_current(stamp, mark, ["cpu", "dev", "math"])
    assert not setup.is_current(stamp, mark, ["vllm", "dev"])


@pytest.mark.parametrize("name", ["pyproject.toml", "scripts/setup.py"])
def test_a_stamp_ends_with_any_change_to_what_would_be_installed(project, name):
    before = setup.fingerprint(project, "3.11.7")
    assert setup.fingerprint(project, "3.11.7") == before
    assert setup.fingerprint(project, "3.12.1") != before
    with (project / name).open("a") as file:
        file.write("\n")
    assert setup.fingerprint(project, "3.11.7") != before


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_a_missing_or_damaged_stamp_is_no_stamp(tmp_path, text):
    path = tmp_path / "stamp.json"
    if text is not None:
        path.write_text(text)
    assert setup.read_stamp(path) == {}
    assert not setup.is_current({}, "mark", [])


def test_too_little_disk_is_said_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.setitem(setup.DISK_GB, "cpu", 10**9)
    with pytest.raises(setup.SetupError, match="GB free and the CPU build needs"):
        setup.check_disk(tmp_path, "cpu")


def test_an_environment_of_another_python_is_left_alone(tmp_path):
    installer = setup.Installer(tmp_path)
    installer.venv.mkdir()
    (installer.venv / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.9.2\n")
    with pytest.raises(setup.SetupError, match=r"made with Python 3\.9\.2.*make clean"):
        installer.create_venv(clear=False)
    assert not (installer.venv / "bin").exists()


def test_a_failed_command_gives_the_line_that_says_why(tmp_path, capsys):
    installer = setup.Installer(tmp_path)
    installer.venv.mkdir()
    with installer.log_path.open("w") as installer.log:
        assert installer.run(["sh", "-c", "echo ERROR: an old one; exit 0"], "works") is None
        assert installer.run(["sh", "-c", "echo ERROR: no such thing; echo bye; exit 1"], "fails") == (
            "ERROR: no such thing"
        )
        assert installer.run(["sh", "-c", "exit 3"], "fails silently") == "exit code 3"
        offline = "echo WARNING: Retrying after connection broken by X; echo ERROR: nothing found; exit 1"
        assert installer.run(["sh", "-c", offline], "has no network") == (
            "ERROR: nothing found (the package index did not answer)"
        )
    assert "bye" in installer.log_path.read_text()


def test_imports_are_tried_in_a_process_that_may_die(tmp_path):
    installer = setup.Installer(tmp_path)
    installer.python = sys.executable
    installer.venv.mkdir()
    (installer.venv / "broken.py").write_text("raise RuntimeError('operator does not exist')\n")
    (installer.venv / "deadly.py").write_text("import os; os.abort()\n")
    with installer.log_path.open("w") as installer.log:
        results = installer.try_imports(["json", "broken", "no_such_module", "deadly"])
    assert "error" not in results["json"]
    assert results["broken"] == {"error": "RuntimeError: operator does not exist", "missing": False}
    assert results["no_such_module"]["missing"]
    assert "died" in results["deadly"]["error"] and not results["deadly"]["missing"]


def test_the_command_line_says_one_line_and_exits(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--extras", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no extra nonsense") and done.stderr.count("\n") == 1
