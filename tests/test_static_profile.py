"""Static graphs in bundles: what export writes, what a run takes, and that texts are those of the cpu profile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_checkpoint
from conftest import NOWHERE
from test_cli import fails, omnidraft

from omnidraft.adapters.settings import RANK
from omnidraft.export import cache, parity, static_profile
from omnidraft.export.pipeline import Order, export
from omnidraft.runtime import calibration, placement
from omnidraft.runtime.bundle import MANIFEST, open_bundle
from omnidraft.runtime.calibration import Calibration, calibrate
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.options import Options
from omnidraft.runtime.pair import Pair, load_pair
from omnidraft.runtime.placement import Wish, Wishes, read_wishes
from omnidraft.runtime.sampling import Sampling
from omnidraft.runtime.state import State
from omnidraft.runtime.static_decoder import StaticDecoder, exact_width
from omnidraft.tools.packages.contents import Needs, select

pytest.importorskip("torch")
ROOM = 192
STATIC = read_wishes("auto", profile="static")
PROMPTS = ("The boat came back", "def total(values):", "Water boils at 100 degrees; and", "A train")


class Quiet:
    def plan(self, steps: int) -> None: ...
    def step(self, what: str) -> None: ...
    def note(self, text: str) -> None: ...


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Order:
    """Two random models, one of them both drafter and target: much is accepted."""
    folder = tmp_path_factory.mktemp("static")
    write_checkpoint(folder / "llama", max_position_embeddings=512)
    write_checkpoint(folder / "qwen3", "qwen3", seed=2)
    targets = {"one": str(folder / "llama"), "two": str(folder / "qwen3")}
    return Order(
        str(folder / "llama"), targets, folder / "bundle", ("fp32", "a16w8"), "fp32", 1, ("cpu", "static"), ROOM
    )


@pytest.fixture(scope="module")
def small(order: Order) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cache_root", lambda: order.out.parent / "cache")
        patch.setattr(parity, "THRESHOLDS", {**parity.THRESHOLDS, "a16w8": parity.Threshold(0.3)})
        export(order, Quiet())
    return order.out


def answers(
    pair: Pair, options: Options, measured: Calibration, count: int = 48
) -> tuple[list[list[int]], dict[str, float]]:
    """Tokens of an answer to each prompt, greedy and sampled in turn, and counts added up."""
    engine, found, total = Engine(pair, options, NOWHERE, measured), [], dict[str, float]()
    for i, prompt in enumerate(PROMPTS):
        sampling = Sampling(0.8, top_p=0.95, seed=i) if i % 2 else Sampling()
        report = engine.generate(prompt, sampling=sampling, max_new_tokens=count)
        found.append(report.tokens)
        total = {name: total.get(name, 0) + value for name, value in report.counts.items()}
    return found, total


def test_what_export_writes(small: Path) -> None:
    opened = open_bundle(small)
    opened.verify(opened.files)
    on_disk = {path.relative_to(small).as_posix() for path in small.rglob("*") if path.is_file()}
    assert on_disk == {*opened.files, MANIFEST}
    labels = {name: [graph.label for graph in target.graphs] for name, target in opened.targets.items()}
    assert labels == {name: ["fp32", "fp32, static", "a16w8, static"] for name in ("one", "two")}
    assert [graph.label for graph in opened.drafter.all_graphs] == ["fp32", "fp32, static"]
    for graph in (*opened.drafter.graphs, *opened.targets["two"].graphs[1:]):
        assert graph.static is not None and graph.static["context"] == ROOM
        assert [int(width) for width in graph.static["widths"]] == list(static_profile.WIDTHS)
        assert graph.static["rank"] == (static_profile.RANK if graph.folder.startswith("drafter") else 0)
        assert graph.parity["positions"] == ROOM
    exact, quantized = opened.targets["two"].graphs[1:]
    assert exact.parity["top1_agreement"] == 1.0 and exact.parity["greedy_equal"]
    assert exact.parity["perplexity"] == exact.parity["source_perplexity"]
    assert exact.parity["perplexity"] != quantized.parity["perplexity"]
    assert static_profile.RANK >= RANK, "what learns on the device by default fits"


def test_what_nnapi_would_take(small: Path) -> None:
    """Plain float operators wholly; of 16-bit activations, which it has not, the checker would know nothing."""
    opened = open_bundle(small)
    _, exact, quantized = opened.targets["one"].graphs
    assert exact.nnapi is not None and quantized.nnapi is None
    assert (exact.nnapi["partitions"], exact.nnapi["share"], exact.nnapi["unsupported"]) == (1, 1.0, [])
    assert exact.nnapi["verdict"] == "yes" and exact.nnapi["nodes"] > 50
    shown = omnidraft("show", small)
    assert "NNAPI takes 100.0% of" in shown.stdout and "nothing was run" in shown.stdout


def test_static_text_is_the_cpu_profiles_drafted_or_not(small: Path) -> None:
    """Greedy and sampled, fp32: each model static, both, and none; measured here, not assumed."""
    cpu = load_pair(small, "two", "fp32")
    expected, _ = answers(cpu, Options("off"), calibrate(cpu, NOWHERE, times=False))
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    for wishes in (STATIC, Wishes(Wish(profile="static"), Wish(profile="cpu")), Wishes(Wish(), Wish(profile="static"))):
        pair = load_pair(small, "two", "fp32", wishes=wishes)
        measured = calibrate(pair, NOWHERE)
        assert measured.least_rows is not None
        for draft in ("off", "3", "8", "cost"):
            assert answers(pair, Options(draft), measured)[0] == expected


def test_quantized_text_with_drafts_is_that_without(small: Path) -> None:
    pair = load_pair(small, "one", "a16w8")
    measured = calibrate(pair, NOWHERE)
    plain, _ = answers(pair, Options("off"), measured)
    cpu, _ = answers(load_pair(small, "one", "fp32"), Options("off"), Calibration(2))
    assert plain != cpu, "the control: these graphs are not the others"
    for draft in ("2", "7", "cost"):
        drafted, counts = answers(pair, Options(draft), measured)
        assert drafted == plain and counts["accepted"] > 0


def test_where_rows_agree_at_one_width_only_every_pass_has_it(small: Path) -> None:
    """The fixed-width fallback: no pass behind the prompt is of another graph, and the text is exact."""
    pair = load_pair(small, "one", "fp32", wishes=STATIC)
    target = pair.target.decoder
    assert isinstance(target, StaticDecoder) and exact_width(target, ROOM) == 5
    fixed = replace(calibrate(pair, NOWHERE), w0=None, width=5)
    engine = Engine(pair, Options("8"), NOWHERE, fixed)
    ran = list[int]()
    begun = target.run

    def run(ids: Any) -> np.ndarray:
        ran.append(len(ids))
        return begun(ids)

    target.run = run  # type: ignore[method-assign]
    report = engine.generate(PROMPTS[0], sampling=Sampling(), max_new_tokens=40)
    assert report.counts["rounds"] > 5 and set(ran[1:]) == {5}
    assert (report.lossless, report.decode_width) == ("exact", 5)
    assert report.counts["proposed"] <= 4 * report.counts["rounds"]
    plain, _ = answers(pair, Options("off"), fixed)
    for draft in ("2", "8", "cost", "threshold"):
        assert answers(pair, Options(draft), fixed)[0] == plain


def test_the_width_is_found_where_w0_is_not(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And kept, apart from what was found of the other profile's graph; a dynamic graph has no width."""
    monkeypatch.setattr(calibration, "probe", lambda decoder, context: None)
    state = State(tmp_path / "state", pytest.fail)
    found = calibrate(load_pair(small, "one", "fp32", wishes=STATIC), state)
    assert (found.w0, found.width, found.least_rows) == (None, 5, 5)
    assert found.target is not None and found.target.widths == (1, 2, 5, 6, 17)
    dynamic = calibrate(load_pair(small, "one", "fp32"), state)
    assert (dynamic.w0, dynamic.width, dynamic.least_rows) == (None, None, None)
    monkeypatch.setattr(calibration, "exact_width", lambda decoder, context: pytest.fail("known already"))
    assert calibrate(load_pair(small, "one", "fp32", wishes=STATIC), state) == found


@pytest.mark.parametrize(
    ("wishes", "precision", "expected"),
    [
        (Wishes(), None, ("fp32", "fp32")),
        (Wishes(), "a16w8", ("a16w8, static", "fp32")),
        (STATIC, None, ("fp32, static", "fp32, static")),
        (read_wishes("nnapi"), None, ("fp32, static", "fp32, static")),
        (read_wishes("target=qnn,drafter=cpu"), "a16w8", ("a16w8, static", "fp32")),
        (read_wishes("drafter=nnapi"), None, ("fp32", "fp32, static")),
        (read_wishes("nnapi", profile="cpu"), None, ("fp32", "fp32")),
    ],
)
def test_which_graphs_a_run_takes(
    small: Path, wishes: Wishes, precision: str | None, expected: tuple[str, str]
) -> None:
    opened = open_bundle(small)
    graph = opened.graph("one", precision, wishes.target.profiles)
    assert (graph.label, opened.drafter_graph(wishes.drafter.profiles).label) == expected


def test_a_model_has_no_more_positions_than_its_graph(small: Path) -> None:
    static, cpu = load_pair(small, "one", wishes=STATIC), load_pair(small, "one")
    assert (static.target.info.context, cpu.target.info.context) == (ROOM, 512)
    engine = Engine(static, Options("2"), NOWHERE, calibrate(static, NOWHERE, times=False))
    with pytest.raises(OmniDraftError, match=f"has a context of {ROOM}; set max-new-tokens to at most"):
        engine.generate(PROMPTS[0], sampling=Sampling(), max_new_tokens=ROOM)
    room = engine.room(len(engine.encode(PROMPTS[0], 1)[0]))
    assert len(engine.generate(PROMPTS[0], sampling=Sampling(), max_new_tokens=room).tokens) == room


def test_run_says_which_graphs_ran(small: Path, tmp_path: Path) -> None:
    arguments = ("run", small, PROMPTS[0], "--max-new-tokens", "8", "--state", tmp_path / "state", "--verbose")
    assert "graphs: target static, drafter static\n" in omnidraft(*arguments, "--profile", "static").stderr
    assert "graphs: target cpu, drafter cpu\n" in omnidraft(*arguments).stderr
    found = json.loads(
        omnidraft("calibrate", small, "--profile", "static", "--json", "--state", tmp_path / "state").stdout
    )
    assert found["target"]["widths"] == [1, 2, 5, 6, 17]
    assert "--profile gpu: no such profile" in fails(*arguments, "--profile", "gpu")


@pytest.mark.skipif("NnapiExecutionProvider" in placement.ort.get_available_providers(), reason="NNAPI is here")
def test_without_nnapi_its_graphs_run_on_the_cpu_and_it_is_said(small: Path, tmp_path: Path) -> None:
    arguments = ("run", small, PROMPTS[0], "--max-new-tokens", "4", "--state", tmp_path / "state", "--ep", "nnapi")
    ran = omnidraft(*arguments)
    assert "target and drafter: asked for nnapi, on the CPU because this ONNX Runtime has no" in ran.stderr
    assert "asked for nnapi" in fails(*arguments, "--strict-ep")


def test_doctor_and_pack_know_them(small: Path, tmp_path: Path) -> None:
    said = omnidraft("doctor", small, "--state", tmp_path / "state").stdout
    assert "two, fp32, static" in said and f"for {ROOM} tokens" in said
    along, without = (select(small, "two", "fp32", Needs(learns=False, static=static)) for static in (True, False))
    assert [graph.label for graph in along.static] == ["fp32, static", "fp32, static"]
    for selection in (along, without):
        manifest = selection.manifest()
        parts = [manifest["drafter"], manifest["targets"]["two"]]
        assert [len(part["graphs"]) for part in parts] == ([1, 2] if selection is along else [0, 1])
        for item in selection.items():
            path = tmp_path / str(selection is along) / item.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(item.source.read_bytes() if isinstance(item.source, Path) else item.source)
        packed = open_bundle(tmp_path / str(selection is along) / "bundle")
        packed.verify(packed.files)
    pair = load_pair(tmp_path / "True" / "bundle", wishes=STATIC)
    assert isinstance(pair.target.decoder, StaticDecoder)


def _without_description(manifest: dict[str, Any]) -> None:
    del manifest["targets"]["one"]["graphs"][1]["static"]


def _described(**change: Any) -> Callable[[dict[str, Any]], None]:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["targets"]["one"]["graphs"][1]["static"].update(change)

    return edit


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (_without_description, "must contain .*static"),
        (_described(widths={"5": "../../two/static-fp32/s5.onnx"}), "must match pattern"),
        (_described(widths={"5": "s6.onnx"}), "'targets/one/static-fp32/s6.onnx' is used but not listed under files"),
        (_described(weights="none.bin"), "static-fp32/none.bin' is used but not listed under files"),
        (_described(context=10**12), "must be smaller than or equal to 1000000"),
        (_described(context=64), r"attention_mask is .*its description says .*64\]; export again|order is \[192\]"),
        (_described(layers=1), "past_key_1 is .*its description says not there; export again"),
        (_described(layers=9), "past_key_2 is missing, its description says .*; export again"),
        (_described(vocabulary=385), r"logits is \[1, 1, 384\], its description says \[1, 1, 385\]; export again"),
    ],
)
def test_a_damaged_description_is_one_line(
    small: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], line: str
) -> None:
    shutil.copytree(small, tmp_path / "bundle", symlinks=True)
    manifest = json.loads((small / MANIFEST).read_text())
    edit(manifest)
    (tmp_path / "bundle" / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(OmniDraftError, match=f"^[^\n]*({line})[^\n]*$"):
        load_pair(tmp_path / "bundle", "one", wishes=STATIC)


def test_a_bundle_without_static_graphs_says_so(small: Path, tmp_path: Path) -> None:
    """And one from before there were any opens."""
    shutil.copytree(small, tmp_path / "bundle")
    manifest = json.loads((small / MANIFEST).read_text())
    del manifest["drafter"]["graphs"]
    for target in manifest["targets"].values():
        target["graphs"] = target["graphs"][:1]
    (tmp_path / "bundle" / MANIFEST).write_text(json.dumps(manifest))
    assert load_pair(tmp_path / "bundle", "one").precision == "fp32"
    with pytest.raises(OmniDraftError, match=r"'one' has no graph of the profile static; it has fp32 \(cpu\)$"):
        load_pair(tmp_path / "bundle", "one", wishes=STATIC)
    with pytest.raises(OmniDraftError, match=r"the drafter has no static graph; it has cpu$"):
        load_pair(tmp_path / "bundle", "one", wishes=Wishes(drafter=Wish(profile="static")))


def test_poor_quality_is_refused_and_nothing_written(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "THRESHOLDS", {**parity.THRESHOLDS, "a8w8": parity.Threshold(0.995)})
    poor = replace(order, targets={"two": order.targets["two"]}, out=tmp_path / "out", precisions=("a8w8",))
    with pytest.raises(OmniDraftError, match=r"'two', static, at a8w8 does not match its source: .*not written$"):
        export(poor, Quiet())
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_has_no_static_graph_is_refused_before_any_work(order: Order, tmp_path: Path) -> None:
    said = list[str]()

    class Log(Quiet):
        def step(self, what: str) -> None:
            said.append(what)

    folder = write_checkpoint(tmp_path / "phi3", "phi3")
    with pytest.raises(OmniDraftError, match="no static graph for it: architecture Phi3ForCausalLM is not one of"):
        export(replace(order, drafter=str(folder), out=tmp_path / "out"), Log())
    assert said == ["drafter: reading"]
