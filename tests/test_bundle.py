"""A bundle is read with suspicion: every path stays inside, every part is described."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnidraft.runtime.bundle import open_bundle
from omnidraft.runtime.errors import OmniDraftError

pytestmark = pytest.mark.model


@pytest.fixture
def edited(bundle: Path, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], None]], Path]:
    """A bundle of small stand-in files with a changed manifest."""

    def edit(change: Callable[[dict[str, Any]], None]) -> Path:
        manifest = json.loads((bundle / "manifest.json").read_text())
        for name in manifest["files"]:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
        change(manifest)
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        return tmp_path

    return edit


def test_untouched_manifest_opens(edited: Any) -> None:
    opened = open_bundle(edited(lambda m: None))
    assert opened.drafter.trainable and opened.drafter.lora
    name, target = opened.target(None)
    assert [g.precision for g in target.graphs] == ["int8", "int4", "fp32"]
    assert opened.graph(name, None).precision == "int8"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("files"),
        lambda m: m.update(schema="omnidraft-bundle/99"),
        lambda m: m["files"].update({"../outside": {"sha256": "0" * 64, "size": 0}}),
        lambda m: m["files"].update({"/etc/passwd": {"sha256": "0" * 64, "size": 0}}),
        lambda m: m["drafter"].update(stop_ids=[-1]),
        lambda m: m["drafter"].update(unknown_field=1),
        lambda m: m["targets"].clear(),
        lambda m: m["targets"]["smollm2"].update(graphs=[]),
        lambda m: m["targets"]["smollm2"].update(map="no/such/file"),
    ],
)
def test_wrong_manifests_are_one_line(edited: Any, change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(OmniDraftError) as caught:
        open_bundle(edited(change))
    assert "\n" not in str(caught.value) and "manifest.json" in str(caught.value)


def test_a_link_out_of_the_bundle_is_refused(edited: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = edited(lambda m: None)
    outside = tmp_path_factory.mktemp("outside") / "secret"
    outside.touch()
    victim = folder / "drafter/tokenizer.json"
    victim.unlink()
    victim.symlink_to(outside)
    with pytest.raises(OmniDraftError, match="leaves the bundle"):
        open_bundle(folder)
    shutil.rmtree(folder)
