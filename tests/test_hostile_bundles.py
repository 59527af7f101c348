"""A bundle of a stranger: its paths stay inside, and its sizes are bounded before anything is made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from omnidraft.runtime.bundle import MAX_MANIFEST_BYTES, open_bundle
from omnidraft.runtime.decoder import Decoder
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.graph_inputs import graph_inputs
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.runtime.vocabulary import load_map
from omnidraft.tools.measure import MAX_PROMPTS_BYTES, read_prompts
from omnidraft.tools.training import rows

ROOT = Path(__file__).parent.parent
SEEDS = ROOT / "tests" / "fuzz" / "corpus"
WEIGHTS = "d/model.onnx.data"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def graph(*locations: str, where: str = "initializer") -> bytes:
    """A small ONNX graph that reads its weights from files of these names."""
    tensors = [TensorProto(name=f"w{i}", dims=[4], data_type=1, data_location=1) for i in range(len(locations))]
    for tensor, location in zip(tensors, locations, strict=True):
        for key, value in (("location", location), ("offset", "0"), ("length", "16")):
            tensor.external_data.add(key=key, value=value)
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, 1, ["n"]) for name in "xy")
    if where == "subgraph":
        inner = helper.make_graph([], "inner", [], [y], tensors)
        nodes.append(helper.make_node("If", ["x"], ["z"], then_branch=inner, else_branch=inner))
    if where == "attribute":
        nodes += [helper.make_node("Constant", [], [t.name], value=t) for t in tensors]
    if where == "context":
        nodes += [helper.make_node("EPContext", ["x"], ["z"], embed_mode=0, ep_cache_context=n) for n in locations]
    made = helper.make_model(helper.make_graph(nodes, "g", [x], [y], tensors if where == "initializer" else []))
    return made.SerializeToString()  # type: ignore[no-any-return]


def write_bundle(folder: Path) -> Path:
    """A bundle of two small graphs, all hashes right."""
    for name, content in {
        "d/model.onnx": graph("model.onnx.data"),
        WEIGHTS: np.arange(4, dtype=np.float32).tobytes(),
        "d/tokenizer.json": b"{}",
        "t/g/model.onnx": graph(),
        "t/vocabulary.json": b"{}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    describe(folder)
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


def describe(folder: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Write the manifest anew, with the hashes of what is there."""
    manifest = json.loads((SEEDS / "manifest" / "plain.json").read_text())
    manifest["files"] = {
        name: {"sha256": sha256(folder / name), "size": (folder / name).stat().st_size} for name in manifest["files"]
    }
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def refused(match: str) -> Any:
    return pytest.raises(OmniDraftError, match=match)


class TestPaths:
    def test_a_bundle_that_is_well_opens(self, bundle: Path) -> None:
        opened = open_bundle(bundle)
        opened.verify(opened.files)

    @pytest.mark.parametrize(
        "name",
        [
            "../x",
            "d/../../x",
            "d/../d/model.onnx",
            "/etc/passwd",
            "./d/x",
            "d//x",
            "d/.",
            "C:\\x",
            "d/a\x00b",
            "d/x\n",
            "",
        ],
    )
    def test_names_that_are_no_plain_path_are_refused(self, bundle: Path, name: str) -> None:
        describe(bundle, lambda m: m["files"].update({name: {"sha256": "0" * 64, "size": 0}}))
        with refused("manifest.json: not a manifest"):
            open_bundle(bundle)

    def test_a_name_that_no_file_system_takes_is_refused(self, bundle: Path) -> None:
        """Found by fuzzing: longer than 255 bytes."""
        describe(bundle, lambda m: m["files"].update({"d/" + "a" * 290: {"sha256": "0" * 64, "size": 0}}))
        with refused("is no path"):
            open_bundle(bundle)

    @pytest.mark.parametrize("lead", ["outside", "inside", "folder"])
    def test_links_are_refused_wherever_they_lead(self, bundle: Path, tmp_path: Path, lead: str) -> None:
        victim = bundle / WEIGHTS
        target = {"outside": tmp_path / "secret", "inside": bundle / "copy", "folder": bundle / "other"}[lead]
        (victim.parent if lead == "folder" else victim).rename(target)
        if lead == "folder":
            victim.parent.symlink_to("other", target_is_directory=True)
        else:
            victim.symlink_to(target)
        with refused("leaves the bundle's folder" if lead == "outside" else "is a link"):
            open_bundle(bundle)

    @pytest.mark.parametrize(
        "location",
        ["../t/vocabulary.json", "/etc/hostname", "../d/model.onnx.data", "model.onnx.data\0x", "unlisted.bin",
         "./model.onnx.data", "*/_ORT_MEM_ADDR_/*", ""],
    )  # fmt: skip
    @pytest.mark.parametrize("where", ["initializer", "subgraph", "attribute", "context"])
    def test_a_graph_reads_listed_files_beside_it_only(self, bundle: Path, location: str, where: str) -> None:
        (bundle / "d" / "unlisted.bin").write_bytes(bytes(16))
        (bundle / "d" / "model.onnx").write_bytes(graph("model.onnx.data", location, where=where))
        describe(bundle)
        opened = open_bundle(bundle)
        with refused("which is no file of the bundle beside it"):
            opened.verify(["d/model.onnx"])

    @pytest.mark.parametrize("where", ["initializer", "subgraph", "attribute", "context"])
    def test_control_files_beside_it_are_found_and_read(self, bundle: Path, where: str) -> None:
        (bundle / "d" / "model.onnx").write_bytes(graph("model.onnx.data", where=where))
        describe(bundle)
        open_bundle(bundle).verify(["d/model.onnx"])

    @pytest.mark.parametrize("part", ["model", "head"])
    def test_a_graph_is_one_whatever_its_name(self, bundle: Path, part: str) -> None:
        (bundle / "d" / "model.bin").write_bytes(graph("../t/vocabulary.json"))
        entry = {"sha256": sha256(bundle / "d" / "model.bin"), "size": (bundle / "d" / "model.bin").stat().st_size}
        named = "d/model.bin" if part == "model" else {"graph": "d/model.bin", "weights": WEIGHTS}
        describe(bundle, lambda m: (m["drafter"].update({part: named}), m["files"].update({"d/model.bin": entry})))
        with refused("which is no file of the bundle beside it"):
            open_bundle(bundle).verify(["d/model.bin"])

    def test_training_graphs_lie_together_as_they_are_loaded(self, bundle: Path) -> None:
        training = {"loss": "d/loss.onnx", "step": "t/step.onnx", "weights": "d/weights.bin"}
        entry = {"sha256": hashlib.sha256(b"").hexdigest(), "size": 0}
        for name in training.values():
            (bundle / name).touch()
        describe(
            bundle,
            lambda m: (
                m["drafter"].update(training=training),
                m["files"].update(dict.fromkeys(training.values(), entry)),
            ),
        )
        with refused("not in one folder"):
            open_bundle(bundle)

    def test_a_graph_at_the_top_would_be_checked_with_nothing_and_is_refused(self, bundle: Path) -> None:
        (bundle / "model.onnx").write_bytes(graph())
        entry = {"sha256": sha256(bundle / "model.onnx"), "size": (bundle / "model.onnx").stat().st_size}
        describe(bundle, lambda m: (m["drafter"].update(model="model.onnx"), m["files"].update({"model.onnx": entry})))
        with refused("not a manifest"):
            open_bundle(bundle)


class TestSizes:
    def test_a_manifest_is_measured_before_it_is_read(self, bundle: Path) -> None:
        with (bundle / "manifest.json").open("r+b") as file:
            file.truncate(MAX_MANIFEST_BYTES + 1)  # a hole: it takes no disk
        with refused("at most"):
            open_bundle(bundle)

    def test_prompts_are_measured_before_they_are_read(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        with path.open("wb") as file:
            file.truncate(MAX_PROMPTS_BYTES + 1)
        with refused("more than 64 MiB"):
            read_prompts(path)

    def test_an_adapter_is_measured_before_it_is_read(self, tmp_path: Path) -> None:
        from omnidraft.runtime.adapter_file import MAX_BYTES, load_adapter

        path = tmp_path / "a.onnx_adapter"
        with path.open("wb") as file:
            file.truncate(MAX_BYTES + 1)
        with refused("at most"):
            load_adapter(path)

    @pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[NaN]", '{"a": Infinity}'])
    def test_json_of_no_standard_is_refused(self, bundle: Path, tmp_path: Path, text: str) -> None:
        (bundle / "manifest.json").write_text(text)
        (tmp_path / "x").write_text(text)
        with refused("manifest.json: not a manifest"):
            open_bundle(bundle)
        with refused("not a tokenizer.json"):
            TokenBytes(text.encode(), "x")
        with refused("damaged vocabulary map"):
            load_map(tmp_path / "x", "", "")
        with refused("not a JSON object"):
            read_prompts(tmp_path / "x")
        assert rows.read_rows([tmp_path / "x"])[0] == []

    @pytest.mark.parametrize("projections", [{"a": [10**9, 1]}, {"a": [0, 1]}, {"a": [1]}, {}, {"\x1b": [1, 1]}])
    def test_layers_that_learn_have_sizes_of_layers(self, bundle: Path, projections: dict[str, Any]) -> None:
        describe(bundle, lambda m: m["drafter"].update(lora={"projections": projections}))
        with refused("not a manifest"):
            open_bundle(bundle)

    def test_token_ids_are_within_the_vocabulary(self, bundle: Path) -> None:
        describe(bundle, lambda m: m["targets"]["one"].update(stop_ids=[64]))
        with refused("beyond its vocabulary"):
            open_bundle(bundle)

    @pytest.mark.parametrize("lie", [{"share": "1"}, {"unsupported": ["\x1b"]}, {"nodes": -1}, {"verdict": "perhaps"}])
    def test_what_a_checker_said_is_what_show_can_print(self, bundle: Path, lie: dict[str, Any]) -> None:
        said = {"nodes": 1, "partitions": 1, "share": 1, "unsupported": ["ai.onnx:Trilu"], "verdict": "no"}
        describe(bundle, lambda m: m["targets"]["one"]["graphs"][0].update(nnapi=said))
        open_bundle(bundle)
        describe(bundle, lambda m: m["targets"]["one"]["graphs"][0].update(nnapi={**said, **lie}))
        with refused("not a manifest"):
            open_bundle(bundle)

    @pytest.mark.parametrize("data", [b"\x3a" + b"\xff" * 200, b"\x80" * 100, b"\x3a\xff\xff\xff\xff\x0f", b""])
    def test_numbers_in_a_graph_file_end(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "x.onnx").write_bytes(data)
        with refused("not an ONNX graph"):
            graph_inputs(tmp_path / "x.onnx")

    def decoder(self, path: Path, heads: int | str = 2, logits: str = "logits", size: int = 8) -> Path:
        """A graph with the names of a decoder, which gives zeros."""
        row = helper.make_tensor_value_info
        past = ["past_key_values.0.key", "past_key_values.0.value"]
        inputs = [row("input_ids", 7, [1, "n"]), row("attention_mask", 7, [1, "all"])]
        inputs += [row(name, 1, [1, heads, "past", 4]) for name in past]
        outputs = [row(logits, 1, [1, "n", size])]
        outputs += [row(name.replace("past_key_values", "present"), 1, [1, heads, "now", 4]) for name in past]
        nodes = [helper.make_node("Identity", [a], [a.replace("past_key_values", "present")]) for a in past]
        nodes.append(helper.make_node("ConstantOfShape", ["three"], [logits]))
        three = helper.make_tensor("three", 7, [3], [1, 1, size])
        made = helper.make_model(
            helper.make_graph(nodes, "g", inputs, outputs, [three]), opset_imports=[helper.make_opsetid("", 17)]
        )
        made.ir_version = 9
        path.write_bytes(made.SerializeToString())
        return path

    @pytest.mark.parametrize("change", [{"heads": 10**7}, {"heads": "h"}, {"heads": 10**6 + 1}, {"logits": "other"}])
    def test_a_graph_that_is_no_decoder_gets_no_memory(self, tmp_path: Path, change: dict[str, Any]) -> None:
        with refused("not a decoder's graph"):
            Decoder(self.decoder(tmp_path / "model.onnx", **change))

    def test_control_a_graph_of_a_decoders_shapes_does(self, tmp_path: Path) -> None:
        decoder = Decoder(self.decoder(tmp_path / "model.onnx"))
        assert decoder.vocabulary == 8 and len(decoder.kv) == 2
