"""omnidraft pack of a bundle with graphs compiled for QNN: exactly these go along, with the CPU's to fall back to."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import simulator
from test_pack import fails, names, pack, unpack

from omnidraft.runtime.bundle import MANIFEST, Graph, open_bundle, read_manifest
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.external_data import external_files
from omnidraft.runtime.options import Options
from omnidraft.runtime.placed import CPU
from omnidraft.runtime.sampling import Sampling

pytest.importorskip("torch")
SOCS = ("SM8550", "X-Elite")


@pytest.fixture(scope="module")
def folder(qnn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bundles: with graphs of all profiles, and with compiled ones only."""
    made = tmp_path_factory.mktemp("qnn")
    simulator.beside(qnn, Path(__file__).parent / "qnn_pack_bundle.py", made)
    return made


@pytest.fixture(scope="module")
def package(folder: Path) -> Path:
    """The package for Android, unpacked."""
    said = pack(folder / "bundle", "--for", "android", "--out", folder / "a.tar.gz")
    assert "static graphs" in said
    return unpack(folder / "a.tar.gz", folder / "unpacked")


def compiled(graphs: tuple[Graph, ...]) -> list[Graph]:
    return [graph for graph in graphs if graph.qnn]


@simulator.needed
def test_the_binaries_and_their_entries_go_along(package: Path, folder: Path) -> None:
    """Of target and drafter, for every SoC, and nothing of the simulator's."""
    made, whole = open_bundle(package / "bundle"), open_bundle(folder / "bundle")
    made.verify(made.files)
    assert names(package / "bundle") == {*made.files, MANIFEST}
    for ours, theirs in ((made.targets["one"], whole.targets["one"]), (made.drafter, whole.drafter)):
        shipped = [graph for graph in theirs.graphs if graph.profile != "qnn:simulator"]
        assert ours.graphs == tuple(shipped) and len(theirs.graphs) == len(shipped) + 1
        assert [graph.profile for graph in compiled(ours.graphs)] == [f"qnn:{soc}" for soc in SOCS]
        for graph in compiled(ours.graphs):
            assert graph.qnn is not None and graph.static is not None
            read = {name for model in graph.models for name in external_files(package / "bundle" / model)}
            expected = {*graph.models, *(f"{graph.folder}/{name}" for name in read)}
            assert expected == set(made.folder_files(graph.model)) and len(graph.models) == 4
            assert graph.qnn["shared"] and len(graph.qnn["binaries"]) == 1 and set(graph.qnn["binaries"]) <= read
    entries = read_manifest(package / "bundle" / MANIFEST)["files"]
    assert all(whole.files[name] == entry for name, entry in entries.items())
    assert not any("simulator" in name for name in made.files)


@simulator.needed
def test_the_cpus_graphs_are_there_to_fall_back_to(package: Path, folder: Path) -> None:
    engine = Engine.open(package / "bundle", options=Options("2"), warn=pytest.fail)
    report = engine.generate("The boat", sampling=Sampling(), max_new_tokens=12)
    assert {where.actual for where in report.placement.values()} == {CPU}
    assert [graph.profile for graph in engine.pair.graphs.values()] == ["cpu", "cpu"]
    plain = Engine.open(folder / "bundle", options=Options("off"))
    assert report.tokens == plain.generate("The boat", sampling=Sampling(), max_new_tokens=12).tokens
    assert report.counts["accepted"] > 0


@simulator.needed
def test_doctor_passes_with_and_without_the_plugin(package: Path, qnn: Path, tmp_path: Path) -> None:
    command = ("-m", "omnidraft.tools.cli", "doctor", package / "bundle", "--json", "--state", tmp_path)
    here = simulator.beside(qnn, *command).stdout.splitlines()[-1]
    elsewhere = simulator.beside(tmp_path / "nothing", *command).stdout
    for said, ending in ((here, "cannot be compared with this device"), (elsewhere, "pip install onnxruntime-qnn")):
        looked = json.loads(said)
        assert looked["works"] and looked["found"]["bundle"]["folder"].endswith("files intact")
        for soc in SOCS:
            line = looked["found"]["bundle"][f"one, fp16, qnn:{soc}"]
            assert line.startswith(f"compiled for {soc} (v2:") and line.endswith(ending)


@simulator.needed
def test_on_a_machine_that_none_was_made_for_the_cpu_decodes(package: Path, qnn: Path) -> None:
    """A package for phones on the simulator: one line, and the text."""
    options = ("--ep", "qnn", "--draft", "2", "--max-new-tokens", "6", "--no-state")
    done = simulator.beside(qnn, "-m", "omnidraft.tools.cli", "run", package / "bundle", "The boat", *options)
    assert "asked for qnn, on the CPU because this machine has QNN's simulator" in done.stderr


@simulator.needed
def test_a_damaged_binary_is_not_packed(folder: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-r", folder / "bundle", tmp_path / "copy"], check=True)
    (binary,) = (tmp_path / "copy/targets/one/qnn-SM8550-fp16").glob("*.bin")
    data = bytearray(binary.read_bytes())
    data[len(data) // 2] ^= 1
    binary.write_bytes(data)
    line = fails(tmp_path / "copy", "--for", "android", "--out", tmp_path / "a.zip")
    assert f"{binary}: changed since export" in line
    pack(tmp_path / "copy", "--for", "web", "--out", tmp_path / "web.zip")


@simulator.needed
def test_who_has_a_use_for_them(folder: Path, tmp_path: Path) -> None:
    for platform, wanted in (("linux-arm64", True), ("ios", False)):
        pack(folder / "bundle", "--for", platform, "--out", tmp_path / f"{platform}.zip")
        made = open_bundle(unpack(tmp_path / f"{platform}.zip", tmp_path / platform) / "bundle")
        assert bool(compiled(made.targets["one"].graphs)) == bool(compiled(made.drafter.graphs)) == wanted
    line = fails(folder / "compiled", "--for", "android", "--out", tmp_path / "a.zip")
    assert line.endswith("decodes with those of cpu; export again with --profile cpu,qnn:SM8550\n")
    line = fails(folder / "bundle", "--for", "android", "--ort-format", "--out", tmp_path / "a.zip")
    assert "graphs compiled for SM8550, X-Elite have no ORT format" in line


@simulator.needed
def test_the_notes_say_what_they_are(package: Path) -> None:
    lines = (package / "README.md").read_text().splitlines()
    (plain,) = (line for line in lines if "for NNAPI" in line)
    (compiled_,) = (line for line in lines if "compiled for QNN" in line)
    assert all(f"`bundle/{where}/static-fp32`" in plain for where in ("drafter", "targets/one"))
    assert all(f"`bundle/{where}/qnn-{soc}-fp16`" in compiled_ for where in ("drafter", "targets/one") for soc in SOCS)
