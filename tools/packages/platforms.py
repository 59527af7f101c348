"""What each platform gets beside the bundle's files, and the ten lines that say what to do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omnidraft.tools.packages import web
from omnidraft.tools.packages.archive import Item
from omnidraft.tools.packages.contents import FOLDER, Selection
from omnidraft.tools.packages.notices import PART, notices, requirements

ROOT = Path(__file__).parents[2]
SOURCES = ("runtime", "adapters", "tools")
HOST = Path(__file__).parent / "android" / "OmniDraftModel.java"
# What the host class was compiled against; opset and IR of the graphs are within its range.
ANDROID_VERSION = "1.29.0"


@dataclass(frozen=True)
class Request:
    """What to pack. `node_modules`: folder with the page's npm packages; `warn`: where to say what is not as usual."""

    selection: Selection
    node_modules: Path | None
    warn: Callable[[str], None]

    @property
    def models(self) -> str:
        """Drafter and target in a few words."""
        chosen, bundle = self.selection, self.selection.bundle
        target = f"{chosen.name} ({chosen.target.source['name']}, {chosen.graph.precision}, {chosen.target.license})"
        return f"target {target}, drafter {bundle.drafter.source['name']} ({bundle.drafter.license})"


def for_linux_arm64(request: Request) -> list[Item]:
    """The runtime's Python sources, with all that learning on the device needs."""
    paths = [path for room in SOURCES for path in (ROOT / room).rglob("*") if path.suffix in (".py", ".json")]
    sources = [Item(f"omnidraft/{path.relative_to(ROOT)}", path, "Python sources") for path in sorted(paths)]
    readme = f"""# OmniDraft for Linux on ARM64: {request.models}

    python3 -m venv .venv && .venv/bin/pip install -r requirements.txt
    .venv/bin/python -m omnidraft.tools.cli run {FOLDER} "Why is the sky blue?"

Python 3.11 or newer. Run it from this folder; `--help` behind a verb explains it.
It learns too: add `--learn on`. Check the files with `sha256sum -c SHA256SUMS`.
"""
    return [*sources, requirements(), *_notes(request, readme, [])]


def for_web(request: Request) -> list[Item]:
    """The page, and its npm packages where they are given."""
    modules, lines = web.module_items(request.node_modules)
    install = "" if modules else f"First, once, in this folder: `{web.INSTALL}`\n\n"
    readme = f"""# OmniDraft for browsers: {request.models}

{install}    python3 -m http.server 8000 --bind 127.0.0.1

Then open http://127.0.0.1:8000. Everything is local: the page may fetch from its own server only.
With the headers `Cross-Origin-Opener-Policy: same-origin` and `Cross-Origin-Embedder-Policy: require-corp`
it runs on up to four threads. Check the files with `sha256sum -c SHA256SUMS`.
"""
    return [*web.page_items(request.selection, request.warn), *modules, *_notes(request, readme, lines)]


def for_android(request: Request) -> list[Item]:
    """The class that hosts the graphs."""
    folders = " and ".join(f"`{FOLDER}/{graph.folder}`" for graph in request.selection.static)
    static = (
        f"{folders}: fixed shapes, for NNAPI and other compilers; the class does not open them.\n" if folders else ""
    )
    readme = f"""# OmniDraft for Android: {request.models}

    implementation("com.microsoft.onnxruntime:onnxruntime-android:{ANDROID_VERSION}")   // build.gradle.kts, minSdk 24

Copy `{FOLDER}/` to the app's files folder (weights lie beside the graphs, so assets will not do) and open both
graphs with `{HOST.name}`: passes with rollback, on the CPU, with learned adapters.
The loop around it (drafting, translation, verification, noise) is to be ported: golden vectors and a short version
of it in JavaScript are in OmniDraft's tests/golden and web.
{static}The class is checked by compiling it; nothing here was executed on Android.
`sha256sum -c SHA256SUMS` checks the files.
"""
    return [Item(f"java/ai/omnidraft/{HOST.name}", HOST, "host class"), *_notes(request, readme, [])]


def for_ios(request: Request) -> list[Item]:
    """The files; a host for them is left to the app."""
    readme = f"""# OmniDraft for iOS: {request.models}

    pod 'onnxruntime-objc'

Add `{FOLDER}/` to the app as a folder reference (weights lie beside the graphs) and open both graphs with
`ORTSession`. The loop around it (drafting, translation, verification, noise) is to be ported: golden vectors and a
short version of it in JavaScript are in OmniDraft's tests/golden and web.
Nothing here was executed on iOS. `shasum -a 256 -c SHA256SUMS` checks the files.
"""
    return _notes(request, readme, [])


def _notes(request: Request, readme: str, others: list[str]) -> list[Item]:
    return [Item("README.md", readme.encode(), PART), *notices(request.selection, others)]


@dataclass(frozen=True)
class Platform:
    """`learns`: whether the drafter can learn there; `static`: whether graphs of fixed shapes are of use there."""

    learns: bool
    static: bool
    items: Callable[[Request], list[Item]]


PLATFORMS = {
    "linux-arm64": Platform(True, True, for_linux_arm64),
    "web": Platform(False, False, for_web),
    "android": Platform(False, True, for_android),
    "ios": Platform(False, False, for_ios),
}
