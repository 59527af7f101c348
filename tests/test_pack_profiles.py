"""omnidraft pack of bundles without graphs of the cpu profile: what a platform can decode with goes along, or a line
says what to export."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from test_pack import Quiet, fails, names, pack, unpack

from omnidraft.export import cache
from omnidraft.export.pipeline import Order, export
from omnidraft.runtime.bundle import open_bundle
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.options import Options
from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.setup_optimum import install

PROMPT = "The old boat"
BUNDLES = {"portable": ("portable",), "both": ("cpu", "portable"), "static": ("static",)}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bundle for each list of profiles, of one random model; with optimum-onnx, as setup-optimum installs it."""
    folder = tmp_path_factory.mktemp("profiles")
    try:
        install(folder / "packages")
    except OmniDraftError as error:
        if "pip could not install" in str(error):
            pytest.skip(str(error))
        raise
    source = str(write_checkpoint(folder / "llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cache_root", lambda: folder / "cache")
        patch.setenv("OMNIDRAFT_OPTIMUM_PACKAGES", str(folder / "packages"))
        for name, profiles in BUNDLES.items():
            room = 160 if "static" in profiles else None
            export(Order(source, {"one": source}, folder / name, ("fp32",), "fp32", 1, profiles, room), Quiet())
    return {name: folder / name for name in BUNDLES}


@pytest.mark.parametrize("format_", [(), ("--ort-format",)], ids=["onnx", "ort"])
@pytest.mark.parametrize("name", ["portable", "static"])
def test_the_python_runtime_decodes_with_other_graphs_too(
    bundles: dict[str, Path], tmp_path: Path, name: str, format_: tuple[str, ...]
) -> None:
    """The package for Linux, by its own sources, on this machine's processor."""
    archive = tmp_path / "a.tar.gz"
    said = pack(bundles[name], "--for", "linux-arm64", "--out", archive, *format_)
    folder = unpack(archive, tmp_path / "unpacked")
    made = open_bundle(folder / "bundle")
    assert [graph.profile for graph in made.targets["one"].graphs] == [name]
    assert names(folder / "bundle") == {*made.files, "manifest.json"}
    assert "target one fp32" in said

    command = [sys.executable, "-m", "omnidraft.tools.cli", "run", "bundle", PROMPT, "--no-state", "--json"]
    limits = ("--draft", "2", "--max-new-tokens", "12")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([*command, *limits], capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    engine = Engine.open(bundles[name], options=Options("off"))
    report = json.loads(done.stdout)
    assert report["text"] == engine.generate(PROMPT, sampling=Sampling(), max_new_tokens=12).text
    assert report["profiles"]["target"] == name


def test_the_graphs_of_the_cpu_profile_come_first(bundles: dict[str, Path], tmp_path: Path) -> None:
    for platform in ("linux-arm64", "android", "ios", "web"):
        pack(bundles["both"], "--for", platform, "--out", tmp_path / f"{platform}.zip")
        made = open_bundle(unpack(tmp_path / f"{platform}.zip", tmp_path / platform) / "bundle")
        assert [graph.profile for graph in made.targets["one"].graphs] == ["cpu"]


@pytest.mark.parametrize(("name", "platform"), [
    ("portable", "web"), ("portable", "android"), ("static", "web"), ("static", "android"), ("static", "ios"),
])  # fmt: skip
def test_hosts_that_cannot_decode_with_them_say_what_to_export(
    bundles: dict[str, Path], tmp_path: Path, name: str, platform: str
) -> None:
    line = fails(bundles[name], "--for", platform, "--out", tmp_path / "a.zip")
    assert f"target 'one' has {name} graphs only, and such a package decodes with those of cpu" in line
    assert line.endswith(f"export again with --profile cpu,{name}\n")
    assert not (tmp_path / "a.zip").exists()


def test_an_app_for_ios_brings_its_own_host(bundles: dict[str, Path], tmp_path: Path) -> None:
    pack(bundles["portable"], "--for", "ios", "--out", tmp_path / "a.zip")
    folder = unpack(tmp_path / "a.zip", tmp_path / "unpacked")
    (graph,) = open_bundle(folder / "bundle").targets["one"].graphs
    assert graph.profile == "portable" and (folder / "bundle" / graph.model).is_file()
    assert "takes its past in and gives past and present out" in (folder / "README.md").read_text()
