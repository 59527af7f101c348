"""The package for a browser: the page, and what it needs beside the bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.tools.packages.archive import Item
from omnidraft.tools.packages.contents import FOLDER, Selection
from omnidraft.tools.packages.prompts import frame_of

PAGE = Path(__file__).parents[2] / "web"
# Tested versions, and the files of them that the page loads.
MODULES = {
    "onnxruntime-web": (
        "1.30.0",
        "MIT",
        ("dist/ort.wasm.min.mjs", "dist/ort-wasm-simd-threaded.mjs", "dist/ort-wasm-simd-threaded.wasm"),
    ),
    "@huggingface/tokenizers": ("0.2.0", "Apache-2.0", ("dist/tokenizers.min.mjs",)),
}
INSTALL = "npm install --ignore-scripts " + " ".join(f"{name}@{made[0]}" for name, made in MODULES.items())


def page_items(selection: Selection, warn: Callable[[str], None]) -> list[Item]:
    """The page, and page.json: which target to load, and what stands around a message (see `prompts`).

    Raises OmniDraftError for a chat template that cannot be rendered ahead.
    """
    if not (PAGE / "index.html").is_file():
        raise OmniDraftError(f"{PAGE}: has no page; pack --for web needs a complete omnidraft, install it again")
    files = sorted(path for path in PAGE.iterdir() if path.suffix in (".html", ".css", ".mjs"))
    bundle, target = selection.bundle, selection.target
    prompts = {"target": frame_of(bundle, target, warn), "drafter": frame_of(bundle, bundle.drafter, warn)}
    if prompts["target"] is None:
        warn(f"target {selection.name!r} has no chat template: the page continues a prompt as text")
    page = {"target": selection.name, "precision": selection.graph.precision, "prompts": prompts}
    text = json.dumps(page, indent=1, ensure_ascii=False) + "\n"
    return [*(Item(path.name, path, "page") for path in files), Item(f"{FOLDER}/page.json", text.encode(), "page")]


def module_items(node_modules: Path | None) -> tuple[list[Item], list[str]]:
    """The npm packages of the page, and a line about each for the notices; nothing where no folder is given.

    Raises OmniDraftError for a folder that lacks one of them.
    """
    items: list[Item] = []
    lines: list[str] = []
    if node_modules is None:
        return items, lines
    for name, (_, licence, files) in MODULES.items():
        folder = node_modules / name
        for file in ("package.json", *files):
            if not (folder / file).is_file():
                raise OmniDraftError(f"{folder / file}: missing; run beside that node_modules: {INSTALL}")
        items += [Item(f"node_modules/{name}/{file}", folder / file, "npm modules") for file in files]
        about = json.loads((folder / "package.json").read_bytes())
        lines.append(f"{name} {about.get('version')}: {about.get('license', licence)}")
        label = name.replace("/", "-").lstrip("@")
        items += [Item(f"LICENSES/{label}-{path.name}", path, "npm modules") for path in _licence_files(folder)]
    return items, lines


def _licence_files(folder: Path) -> list[Path]:
    """Licence and notices of an npm package. ONNX Runtime's has none; those of the Python package are the same."""
    found = _named_like_licences(folder)
    runtime = find_spec("onnxruntime")
    if not found and folder.name == "onnxruntime-web" and runtime is not None and runtime.origin is not None:
        found = _named_like_licences(Path(runtime.origin).parent)
    return found


def _named_like_licences(folder: Path) -> list[Path]:
    names = ("LICEN", "NOTICE", "THIRDPARTY")
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name.upper().startswith(names))
