"""The linux-arm64 package on ARM64: qemu runs an ARM64 Python with the ARM64 builds of what the package needs.

At fp32 the kernels of the two processors round differently (logits agree to about 1e-6), so tokens are the same where
no two are about equally likely; at int8 and int4 they are not, and no test compares them. qemu's speed says nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from shlex import split
from typing import Any

import pytest
from checkpoints import random_model, write_tokenizer
from test_pack import Quiet, pack, unpack

from omnidraft.export import cache
from omnidraft.export.order import Order
from omnidraft.export.pipeline import export

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent / "arm64"
ANSWERS = HERE / "answers.py"
CANNOT = 3  # status of `setup` where this machine has not what it takes
LEARN = split("--trainer onnx-step --rank 8 --rate 3e-3 --batch 2 --interval 1 --budget 100 --rounds 3 --test 0")
SHORT = split("--max-new-tokens 24 --threads 1")
CLI = ("-m", "omnidraft.tools.cli")
Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At fp32: a random drafter, and a target that is the drafter with a little noise, so that some is accepted."""
    import torch

    folder = tmp_path_factory.mktemp("arm64")
    model = random_model()
    for part in ("drafter", "target"):
        model.save_pretrained(folder / part)
        write_tokenizer(folder / part)
        torch.manual_seed(1)
        with torch.no_grad():
            for matrix in (weight for weight in model.parameters() if weight.dim() > 1):
                matrix += 0.05 * matrix.std() * torch.randn_like(matrix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cache_root", lambda: folder / "cache")
        drafter, targets = str(folder / "drafter"), {"one": str(folder / "target")}
        profiles = ("cpu", "static")
        order = Order(drafter, targets, folder / "bundle", ("fp32",), "fp32", profiles=profiles, context=256)
        export(order, Quiet())
    return folder / "bundle"


@pytest.fixture(scope="module")
def package(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked package."""
    folder = tmp_path_factory.mktemp("package")
    pack(bundle, "--for", "linux-arm64", "--out", folder / "p.tar.gz")
    return unpack(folder / "p.tar.gz", folder / "unpacked")


@pytest.fixture(scope="module")
def arm64(package: Path) -> Python:
    """Runs Python on ARM64, in the package's folder and with its sources."""
    return runner(arm64_python(), package)


def arm64_python() -> str:
    """The path of a Python that runs as on ARM64; skips where it cannot be had."""
    environment = {**os.environ, "PYTHON": sys.executable}
    setup = subprocess.run([HERE / "setup"], env=environment, capture_output=True, text=True)
    if setup.returncode == CANNOT:
        pytest.skip(setup.stderr.strip())
    assert setup.returncode == 0, setup.stderr
    return setup.stdout.strip()


def runner(python: str, folder: Path) -> Python:
    """What runs a Python in a folder, with arguments, and returns when it succeeds."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [python, *map(str, arguments)]
        done = subprocess.run(command, cwd=folder, env={"PYTHONPATH": "."}, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture(scope="module")
def x86(package: Path) -> Python:
    """The same on this machine."""
    return runner(sys.executable, package)


def test_the_versions_are_those_that_the_package_asks_for(arm64: Python, package: Path) -> None:
    wanted = dict(line.split("==") for line in (package / "requirements.txt").read_text().split())
    code = "import json, sys; from importlib import metadata; print(json.dumps([*map(metadata.version, sys.argv[1:])]))"
    assert json.loads(arm64("-c", code, *wanted).stdout) == list(wanted.values())
    assert wanted["onnxruntime"] == metadata.version("onnxruntime")


@pytest.mark.parametrize(("profile", "promise"), [("cpu", "near"), ("static", "exact")])
def test_the_tokens_are_those_of_x86(profile: str, promise: str, arm64: Python, x86: Python) -> None:
    """Drafted and plain, greedy and sampled. A row of the dynamic graph depends on how many there are, whatever their
    number (its attention), so the text is near; passes of static graphs always have as many."""
    here, there = (json.loads(python(ANSWERS, "bundle", profile).stdout) for python in (x86, arm64))
    assert (here["machine"], there["machine"]) == ("x86_64", "aarch64")
    assert (here["promise"], there["promise"]) == ("exact", promise)
    assert there["tokens"] == here["tokens"]
    for law in ("greedy", "sampled"):
        assert there["tokens"][f"{law}, draft 3"] == there["tokens"][f"{law}, draft off"]
        assert 0 < there["accepted"][f"{law}, draft 3"] < there["proposed"][f"{law}, draft 3"], "both ways to end"


def test_the_command_says_that_the_text_is_near(arm64: Python) -> None:
    done = arm64(*CLI, "run", "bundle", "Hello", *SHORT, "--no-state")
    assert "no width up to 4 gives equal rows on this device: the text is near, not exact" in done.stderr
    assert "near (text may differ" in done.stderr.splitlines()[-1]


def test_the_drafter_learns_on_arm64(arm64: Python, x86: Python, tmp_path: Path) -> None:
    """Some rounds of `personalize`; the losses are those of x86, an adapter is kept, and no answer changes."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(7 * (json.dumps({"prompt": "How fast is the boat?"}) + "\n"))
    rounds: dict[str, list[list[Any]]] = {}
    for name, python in (("arm64", arm64), ("x86", x86)):
        kept = ("--state", tmp_path / name, "--json", tmp_path / f"{name}.json")
        python(*CLI, "personalize", "bundle", "--prompts", prompts, *LEARN, *SHORT, *kept)
        rounds[name] = json.loads((tmp_path / f"{name}.json").read_text())["session"]["rounds"]
    losses = {name: [loss for _, loss, _ in found] for name, found in rounds.items()}
    assert losses["arm64"] == pytest.approx(losses["x86"], rel=1e-3)
    assert losses["arm64"][-1] < losses["arm64"][0]
    assert [kept for _, _, kept in rounds["arm64"]] == [None, None, True]
    said = [
        arm64(*CLI, "run", "bundle", "When does water boil?", *SHORT, *state).stdout
        for state in (("--state", tmp_path / "arm64"), ("--no-state",))
    ]
    assert said[0] == said[1] != ""
