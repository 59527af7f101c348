"""omnidraft pack --ort-format: graphs in ONNX Runtime's own format compute the same bits, and run from the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint
from onnx import helper
from onnxruntime.tools.ort_format_model import OrtFormatModelProcessor
from onnxruntime.tools.reduced_build_config_parser import parse_config
from test_arm64 import arm64_python, runner
from test_pack import Quiet, fails, names, pack, unpack
from test_web import needs_node, node
from typer.testing import CliRunner

from omnidraft.export import cache, parity
from omnidraft.export.pipeline import Order, export
from omnidraft.runtime.bundle import open_bundle, sha256
from omnidraft.runtime.decoder import Decoder
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.graph_inputs import graph_inputs
from omnidraft.runtime.options import Options
from omnidraft.runtime.ort_format import CONTEXT
from omnidraft.runtime.pair import load_pair
from omnidraft.runtime.placed import CPU, warnings
from omnidraft.runtime.placement import Refused, Wish, open_session, read_wishes, session_options
from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.cli import app
from omnidraft.tools.packages import ort_format
from omnidraft.tools.packages.ort_format import CONFIG

PROMPT = "The old boat"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one random model as drafter and target, so that much is accepted; static graphs too."""
    folder = tmp_path_factory.mktemp("small")
    source = str(write_checkpoint(folder / "llama"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cache_root", lambda: folder / "cache")
        patch.setattr(parity, "THRESHOLDS", {**parity.THRESHOLDS, "int8": parity.Threshold(0.0, float("inf"))})
        profiles = ("cpu", "static")
        export(Order(source, {"one": source}, folder / "bundle", ("fp32", "int8"), "fp32", 1, profiles, 160), Quiet())
    return folder / "bundle"


@pytest.fixture(scope="module")
def packages(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What was packed for Linux at each precision, unpacked."""
    found = {}
    for precision in ("fp32", "int8"):
        folder = tmp_path_factory.mktemp(precision)
        archive = folder / "package.tar.gz"
        pack(small, "--for", "linux-arm64", "--ort-format", "--precision", precision, "--out", archive)
        found[precision] = unpack(archive, folder / "unpacked")
    return found


def copied(bundle: Path, out: Path, **files: bytes) -> Path:
    """A copy of a bundle with other content for some files, described as if it had been exported like that."""
    shutil.copytree(bundle, out)
    manifest = json.loads((out / "manifest.json").read_bytes())
    for name, data in files.items():
        (out / name).write_bytes(data)
        manifest["files"][name] = {"size": len(data), "sha256": sha256(out / name)}
    (out / "manifest.json").write_text(json.dumps(manifest))
    return out


# What is in a package


def test_graphs_that_decode_are_converted_and_nothing_else(packages: dict[str, Path], small: Path) -> None:
    """The training graphs share their weights, and one of their trainers reads ONNX only."""
    folder = packages["int8"]
    made, whole = open_bundle(folder / "bundle"), open_bundle(small)
    made.verify(made.files)
    assert names(folder / "bundle") == {*made.files, "manifest.json"}
    graphs = {name for name in made.files if name.endswith((".onnx", ".ort"))}
    training = {f"drafter/training/{name}.onnx" for name in ("loss", "step")}
    assert {name for name in graphs if name.endswith(".onnx")} == training
    assert made.drafter.model == "drafter/model.ort" and made.drafter.head is not None
    assert made.drafter.head["graph"] == "drafter/head.ort"
    static = [f"static-fp32/s{width}.ort" for width in (1, 5, 17, 64)]
    assert graphs - training == {
        *("drafter/model.ort", "drafter/head.ort", "targets/one/cpu-int8/model.ort"),
        *(f"{where}/{name}" for where in ("drafter", "targets/one") for name in static),
    }
    assert not any(name.endswith(".data") or name.endswith("static-fp32/weights.bin") for name in made.files)
    for graph, original in zip(made.targets["one"].graphs, whole.targets["one"].graphs[1:], strict=True):
        assert (graph.profile, graph.precision, graph.parity) == (original.profile, original.precision, original.parity)
    others = {name for name in made.files if not name.endswith(".ort")}
    assert all(made.files[name] == whole.files[name] for name in others)


@pytest.mark.parametrize("platform", ["android", "ios", "web"])
def test_every_platform_can_have_it_and_is_told_what_it_costs(small: Path, tmp_path: Path, platform: str) -> None:
    """Static graphs have four widths, and their weights in each."""
    archive = tmp_path / "a.zip"
    said = pack(small, "--for", platform, "--ort-format", "--out", archive)
    folder = unpack(archive, tmp_path / "unpacked")
    made = open_bundle(folder / "bundle")
    assert not any(name.endswith(".onnx") for name in made.files)
    assert f"`{CONFIG}`" in (folder / "README.md").read_text()
    assert {CONFIG, "README.md"} <= {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    static = [graph for graph in made.targets["one"].graphs if graph.static]
    assert bool(static) == (platform == "android") == ("static graphs" in said)

    (line,) = (line for line in said.splitlines() if line.startswith("in ORT format every graph holds its weights: "))
    after, before = (float(word) for word in line.split() if "." in word)
    assert after == pytest.approx(sum(file["size"] for file in made.files.values()) / 1e6, abs=0.1)
    weights = (small / "targets/one/static-fp32/weights.bin").stat().st_size
    assert (after - before > 3 * weights / 1e6) == bool(static)


def test_the_configuration_names_every_operator(packages: dict[str, Path]) -> None:
    """As the build reads it, with types; what stands in the folder decides, not what was meant to."""
    for folder in packages.values():
        needed: dict[str, dict[int, set[str]]] = {}
        for path in folder.rglob("*.ort"):
            OrtFormatModelProcessor(str(path), needed, None).process()
        allowed, types = parse_config(str(folder / CONFIG), enable_type_reduction=True)
        assert types is not None and {"ai.onnx", "com.microsoft"} == needed.keys()
        assert needed == {domain: {n: set(ops) for n, ops in found.items()} for domain, found in allowed.items()}
        text = (folder / CONFIG).read_text()
        assert text.startswith("# of the graphs in bundle/, converted with onnxruntime ") and "tmp" not in text


def test_operators_for_compilers_are_left_as_they_are(packages: dict[str, Path]) -> None:
    """NNAPI knows none of ONNX Runtime's own operators, which the other graphs are made of."""
    found: dict[str, dict[str, Any]] = {"static": {}, "cpu": {}}
    for path in (packages["fp32"] / "bundle/targets").rglob("*.ort"):
        OrtFormatModelProcessor(str(path), found[path.parent.name.split("-")[0]], None).process()
    assert found["static"].keys() == {"ai.onnx"} and "com.microsoft" in found["cpu"]


# It computes the same


def logits(model: Path, adapter: Mapping[str, np.ndarray] | None = None) -> list[np.ndarray]:
    decoder = Decoder(model)
    decoder.set_adapter(adapter)
    rng = np.random.default_rng(0)
    return [decoder.run(rng.integers(0, decoder.vocabulary, rows)).copy() for rows in (40, 2, 5, 1)]


@pytest.mark.parametrize("name", ["drafter/model", "targets/one/cpu-fp32/model", "targets/one/cpu-int8/model"])
def test_logits_are_equal_bit_for_bit(packages: dict[str, Path], small: Path, name: str) -> None:
    folder = packages["int8" if "int8" in name else "fp32"] / "bundle"
    expected = logits(small / f"{name}.onnx")
    assert all(map(np.array_equal, logits(folder / f"{name}.ort"), expected))


def test_adapters_work(packages: dict[str, Path], small: Path) -> None:
    onnx_graph, ort_graph = small / "drafter/model.onnx", packages["fp32"] / "bundle/drafter/model.ort"
    inputs = Decoder(ort_graph).lora_names
    assert inputs and inputs == Decoder(onnx_graph).lora_names
    shapes, rng = graph_inputs(ort_graph), np.random.default_rng(1)
    sizes = {name: [size if isinstance(size, int) else 4 for size in shapes[name]] for name in inputs}
    adapter = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    with_adapter = logits(ort_graph, adapter)
    assert all(map(np.array_equal, with_adapter, logits(onnx_graph, adapter)))
    assert not np.array_equal(with_adapter[0], logits(ort_graph)[0])


def answers(bundle: Path, precision: str, profile: str, draft: str) -> list[list[int]]:
    engine = Engine.open(
        bundle, None, precision, Options(draft), wishes=read_wishes("auto", profile=profile), warn=pytest.fail
    )
    assert engine.pair.graphs["target"].profile == profile
    laws = (Sampling(), Sampling(0.8, seed=3))
    reports = [engine.generate(PROMPT, sampling=law, max_new_tokens=24) for law in laws]
    assert draft == "off" or sum(report.counts["accepted"] for report in reports) > 0
    for report in reports:
        assert all(where.share == {CPU: 1.0} and not where.why for where in report.placement.values())
    return [report.tokens for report in reports]


@pytest.mark.parametrize(("precision", "profile"), [("int8", "cpu"), ("fp32", "cpu"), ("fp32", "static")])
def test_tokens_are_those_of_the_original(packages: dict[str, Path], small: Path, precision: str, profile: str) -> None:
    package = packages[precision] / "bundle"
    expected = answers(small, precision, profile, "off")
    assert answers(package, precision, profile, "off") == expected
    assert answers(package, precision, profile, "3") == expected


def test_the_package_runs_by_itself(packages: dict[str, Path], small: Path) -> None:
    """By its own sources: it decodes, learns, and passes doctor and show."""
    folder = packages["int8"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}

    def omnidraft(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "omnidraft.tools.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    limits = ("--draft", "2", "--max-new-tokens", "12", "--verbose", "--json")
    done = omnidraft("run", "bundle", PROMPT, "--state", "state", "--learn", "on", *limits)
    expected = Engine.open(small, None, "int8", Options("2")).generate(PROMPT, sampling=Sampling(), max_new_tokens=12)
    assert json.loads(done.stdout)["text"] == expected.text
    looked = json.loads(omnidraft("doctor", "bundle", "--json", "--state", "state").stdout)
    whole = json.loads(CliRunner().invoke(app, ["doctor", str(small), "--json"]).stdout)
    caches = [found["found"]["memory"]["one, int8"].split(" on disk, ")[1].split(";")[0] for found in (looked, whole)]
    assert caches[0] == caches[1] and "for 1000 tokens" in caches[0]
    assert "all" in omnidraft("show", "bundle", "--check").stdout


@needs_node
@pytest.mark.slow
def test_a_browsers_runtime_computes_the_same_too(packages: dict[str, Path], small: Path) -> None:
    """ONNX Runtime Web in Node, with the page's decoder."""
    library = Path(__file__).parent / "web/node_modules/onnxruntime-web/dist/ort.wasm.min.mjs"
    if not library.is_file():
        pytest.skip("npm's packages are not there: see tests/test_web.py")
    model = small / "targets/one/cpu-fp32/model.onnx"
    expected = node("logits.mjs", library, model, f"{model}.data")
    assert node("logits.mjs", library, packages["fp32"] / "bundle/targets/one/cpu-fp32/model.ort") == expected
    assert len({json.dumps(row) for row in expected}) == len(expected) == 6


@pytest.mark.slow
def test_an_arm64_processor_computes_the_same_too(packages: dict[str, Path]) -> None:
    """In qemu, with graphs that were fused on this machine."""
    arguments = ("run", "bundle", PROMPT, "--draft", "2", "--max-new-tokens", "12", "--threads", "1", "--no-state")
    here, there = (
        json.loads(runner(python, packages["fp32"])("-m", "omnidraft.tools.cli", *arguments, "--json").stdout)
        for python in (sys.executable, arm64_python())
    )
    assert there["text"] == here["text"] and there["lossless"] == "near" != here["lossless"]


# What cannot be


def test_what_has_no_such_format_is_one_clear_line(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.zip"
    compiled = copied(small, tmp_path / "compiled")
    manifest = json.loads((compiled / "manifest.json").read_bytes())
    (graph,) = (graph for graph in manifest["targets"]["one"]["graphs"] if graph["profile"] == "static")
    about = {"soc": "SM8550", "binaries": ["weights.bin"], "shared": True, "compatibility": "v2"}
    manifest["targets"]["one"]["graphs"].append({**graph, "profile": "qnn:SM8550", "precision": "fp16", "qnn": about})
    (compiled / "manifest.json").write_text(json.dumps(manifest))
    line = fails(compiled, "--for", "android", "--ort-format", "--out", out)
    assert "compiled for SM8550 have no ORT format; leave out --ort-format, or export without --profile qnn" in line
    pack(compiled, "--for", "ios", "--ort-format", "--out", tmp_path / "ios.zip")

    nodes = [helper.make_node("Nope", [], ["y"])]
    strange = helper.make_model(helper.make_graph(nodes, "g", [], []), opset_imports=[helper.make_opsetid("", 17)])
    strange.ir_version = 9
    broken = copied(small, tmp_path / "broken", **{"drafter/model.onnx": strange.SerializeToString()})
    line = fails(broken, "--for", "ios", "--ort-format", "--out", out)
    assert "ONNX Runtime cannot convert to ORT format (Load model from drafter/model.onnx failed:" in line
    assert "Nope" in line and line.endswith("leave out --ort-format\n")

    monkeypatch.setattr(ort_format, "MOST", 500_000)
    line = fails(small, "--for", "ios", "--ort-format", "--precision", "fp32", "--out", out)
    assert "GB with its weights, and a file in ORT format holds 2; leave out --ort-format, or take a smaller" in line
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "--ort-format needs the package onnx" in fails(small, "--for", "ios", "--ort-format", "--out", out)
    assert not out.exists()


def test_a_provider_whose_nodes_are_not_recorded_is_not_claimed(packages: dict[str, Path]) -> None:
    model = packages["fp32"] / "bundle/targets/one/static-fp32/s1.ort"
    reason = "ONNX Runtime records no nodes of a graph in ORT format: pack without --ort-format"
    _, placed = open_session(model, lambda: session_options(1), Wish("nnapi"))
    assert (placed.actual, placed.share, placed.why) == (CPU, {CPU: 1.0}, f"on the CPU because {reason}")
    with pytest.raises(Refused, match=reason):
        open_session(model, lambda: session_options(1), Wish("nnapi", strict=True))
    pair = load_pair(packages["fp32"] / "bundle", wishes=read_wishes("xnnpack"))
    assert warnings(pair.placement) == [f"target and drafter: asked for xnnpack, on the CPU because {reason}"]


def test_what_a_file_says_is_what_the_onnx_graph_said(packages: dict[str, Path], small: Path) -> None:
    bundle = packages["fp32"] / "bundle"
    graphs = sorted(bundle.rglob("*.ort"))
    assert len(graphs) == 11
    for path in graphs:
        assert graph_inputs(path) == graph_inputs(small / path.relative_to(bundle).with_suffix(".onnx")), path


def test_a_compiled_graph_in_a_strangers_bundle_is_refused(packages: dict[str, Path], tmp_path: Path) -> None:
    head = (packages["fp32"] / "bundle/drafter/head.ort").read_bytes()
    bundle = copied(packages["fp32"] / "bundle", tmp_path / "b", **{"drafter/head.ort": head + CONTEXT})
    with pytest.raises(OmniDraftError, match=r"head\.ort: holds a compiled graph"):
        Engine.open(bundle)
