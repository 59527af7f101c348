"""What each platform gets beside the bundle's files, and the ten lines that say what to do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omnidraft.runtime.bundle import PROFILES
from omnidraft.runtime.ort_format import is_ort_format
from omnidraft.tools.packages import web
from omnidraft.tools.packages.archive import Item
from omnidraft.tools.packages.contents import FOLDER, Needs, Selection
from omnidraft.tools.packages.notices import PART, notices, requirements
from omnidraft.tools.packages.ort_format import CONFIG

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

    @property
    def ort_format(self) -> bool:
        """Whether the graphs are in ONNX Runtime's own format."""
        return is_ort_format(Path(self.selection.graph.model))

    @property
    def weights(self) -> str:
        """Where the weights are, in a few words."""
        return "weights are in the graphs" if self.ort_format else "weights lie beside the graphs"


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
    readme = f"""# OmniDraft for Android: {request.models}

    implementation("com.microsoft.onnxruntime:onnxruntime-android:{ANDROID_VERSION}")   // build.gradle.kts, minSdk 24

Copy `{FOLDER}/` to the app's files folder ({request.weights}, and the class opens paths) and open both
graphs with `{HOST.name}`: passes with rollback, on the CPU, with learned adapters.
The loop around it (drafting, translation, verification, noise) is to be ported: golden vectors and a short version
of it in JavaScript are in OmniDraft's tests/golden and web.
{_for_compilers(request.selection)}The class is checked by compiling it; nothing here was executed on Android.
`sha256sum -c SHA256SUMS` checks the files.
"""
    return [Item(f"java/ai/omnidraft/{HOST.name}", HOST, "host class"), *_notes(request, readme, [])]


def _for_compilers(selection: Selection) -> str:
    """A line each about graphs of fixed shapes, and about those that are compiled, if there are any."""
    qnn = "com.qualcomm.qti:onnxruntime-android-qnn and com.qualcomm.qti:qnn-runtime"
    kinds = {"fixed shapes, for NNAPI and other compilers": False, f"compiled for QNN, which comes with {qnn}": True}
    lines = ""
    for kind, compiled in kinds.items():
        folders = [f"`{FOLDER}/{graph.folder}`" for graph in selection.static if (graph.qnn is not None) == compiled]
        lines += f"{' and '.join(folders)}: {kind}; the class does not open them.\n" if folders else ""
    return lines


def for_ios(request: Request) -> list[Item]:
    """The files; a host for them is left to the app."""
    portable = request.selection.graph.profile == "portable"
    past = "The target takes its past in and gives past and present out: cut it to roll back.\n" if portable else ""
    readme = f"""# OmniDraft for iOS: {request.models}

    pod 'onnxruntime-objc'

Add `{FOLDER}/` to the app as a folder reference ({request.weights}) and open both graphs with
`ORTSession`. The loop around it (drafting, translation, verification, noise) is to be ported: golden vectors and a
short version of it in JavaScript are in OmniDraft's tests/golden and web.
{past}Nothing here was executed on iOS. `shasum -a 256 -c SHA256SUMS` checks the files.
"""
    return _notes(request, readme, [])


def _notes(request: Request, readme: str, others: list[str]) -> list[Item]:
    if request.ort_format:
        readme += f"The graphs are in ORT format. `{CONFIG}` says what a reduced ONNX Runtime needs to decode\n"
        readme += "(`build.sh --include_ops_by_config`, with `--enable_reduced_operator_type_support`).\n"
    return [Item("README.md", readme.encode(), PART), *notices(request.selection, others)]


@dataclass(frozen=True)
class Platform:
    """What a platform needs of a bundle, and what it gets beside that."""

    needs: Needs
    items: Callable[[Request], list[Item]]


# The page and the host class feed and roll back graphs of the cpu profile; an app for iOS brings a host of its own.
PLATFORMS = {
    "linux-arm64": Platform(Needs(learns=True, static=True, profiles=PROFILES), for_linux_arm64),
    "web": Platform(Needs(learns=False, static=False), for_web),
    "android": Platform(Needs(learns=False, static=True), for_android),
    "ios": Platform(Needs(learns=False, static=False, profiles=("cpu", "portable")), for_ios),
}
