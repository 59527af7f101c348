"""omnidraft pack: what is in each package, that it is whole, the same every time, and runs where it can be run here."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from datetime import datetime
from pathlib import Path

import pytest
from checkpoints import TEMPLATE, write_checkpoint
from typer.testing import CliRunner

from omnidraft.export import cache, parity
from omnidraft.export.pipeline import Order, export
from omnidraft.runtime.bundle import open_bundle
from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.cli import app
from omnidraft.tools.packages.archive import Item, write_archive
from omnidraft.tools.packages.platforms import HOST
from omnidraft.tools.packages.web import MODULES

ROOT = Path(__file__).parent.parent
PLATFORMS = ("linux-arm64", "web", "android", "ios")


class Quiet:
    def plan(self, steps: int) -> None: ...
    def step(self, what: str) -> None: ...
    def note(self, text: str) -> None: ...


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of random models: one drafter, two targets, two precisions."""
    folder = tmp_path_factory.mktemp("pack")
    write_checkpoint(folder / "llama")
    write_checkpoint(folder / "qwen3", "qwen3", seed=2)
    targets = {"one": str(folder / "llama"), "two": str(folder / "qwen3")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "cache_root", lambda: folder / "cache")
        patch.setattr(parity, "THRESHOLDS", {**parity.THRESHOLDS, "int8": parity.Threshold(0.0, float("inf"))})
        export(Order(str(folder / "llama"), targets, folder / "bundle", ("fp32", "int8"), "fp32"), Quiet())
    return folder / "bundle"


def pack(*arguments: str | Path) -> str:
    """What a command that succeeds prints."""
    result = CliRunner().invoke(app, ["pack", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*arguments: str | Path) -> str:
    """The one line of a command that fails."""
    result = CliRunner().invoke(app, ["pack", *map(str, arguments)])
    assert result.exit_code == 1 and result.stdout == "", result.output
    assert result.stderr.startswith("omnidraft: ") and result.stderr.count("\n") == 1
    return result.stderr


def unpack(archive: Path, folder: Path) -> Path:
    """The one folder that an archive holds."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)
    else:
        with tarfile.open(archive) as packed:
            packed.extractall(folder)  # our own archive; filters are younger than Python 3.11.0
    (inside,) = folder.iterdir()
    return inside


@pytest.fixture(scope="module")
def unpacked(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every platform's package of the second target at int8."""
    found = {}
    for number, name in enumerate(PLATFORMS):
        folder = tmp_path_factory.mktemp(name)
        archive = folder / f"package{('.tar.gz', '.zip')[number % 2]}"
        pack(small, "--for", name, "--out", archive, "--target", "two", "--precision", "int8")
        found[name] = unpack(archive, folder / "unpacked")
    return found


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_package_holds_one_pair_and_its_bundle_is_valid(unpacked: dict[str, Path], small: Path, name: str) -> None:
    folder = unpacked[name]
    assert folder.name == f"omnidraft-{name}"
    made, whole = open_bundle(folder / "bundle"), open_bundle(small)
    made.verify(made.files)
    assert list(made.targets) == ["two"] and [g.precision for g in made.targets["two"].graphs] == ["int8"]
    beside = {"manifest.json"} | ({"page.json"} if name == "web" else set())
    assert names(folder / "bundle") == set(made.files) | beside
    assert made.files.items() <= whole.files.items() and len(made.files) < len(whole.files)
    learns = name == "linux-arm64"
    assert (made.drafter.training is not None) == (made.drafter.lora is not None) == made.drafter.trainable == learns
    assert not any("fp32" in file or "targets/one" in file for file in made.files)


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_file_has_its_sum_and_every_package_its_notes(unpacked: dict[str, Path], name: str) -> None:
    folder = unpacked[name]
    lines = [line.split("  ", 1) for line in (folder / "SHA256SUMS").read_text().splitlines()]
    assert {path for _, path in lines} == names(folder) - {"SHA256SUMS"}
    for digest, path in lines:
        assert hashlib.sha256((folder / path).read_bytes()).hexdigest() == digest, path
    readme = (folder / "README.md").read_text()
    assert len(readme.splitlines()) <= 10 and "apache-2.0" in readme
    assert "apache-2.0" in (folder / "LICENSES/NOTICES.md").read_text()
    assert "Apache License" in (folder / "LICENSES/omnidraft.txt").read_text()


@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_the_same_content_gives_the_same_bytes(small: Path, tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / "other" / f"b{suffix}"
    for archive in (first, second):
        said = pack(small, "--for", "android", "--out", archive)
        assert "drafter" in said and "target one fp32" in said and "MB" in said and str(archive) in said
    assert first.read_bytes() == second.read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_files_are_in_order_and_of_one_time(small: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.gz"
    pack(small, "--for", "ios", "--out", archive)
    with tarfile.open(archive) as packed:
        members = packed.getmembers()
    assert [m.name for m in members] == sorted(m.name for m in members)
    assert {(m.mtime, m.mode, m.uid, m.gid, m.uname) for m in members} == {(315532800, 0o644, 0, 0, "")}


def test_an_archive_is_replaced_and_nothing_else(small: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    for name in ("ios", "android"):
        pack(small, "--for", name, "--out", archive)
    assert unpack(archive, tmp_path / "unpacked").name == "omnidraft-android"
    (tmp_path / "text.zip").write_text("my diary")
    (tmp_path / "folder.zip").mkdir()
    for name in ("text.zip", "folder.zip"):
        assert f"{name}: is there and is no .zip archive" in fails(small, "--for", "ios", "--out", tmp_path / name)
    assert (tmp_path / "text.zip").read_text() == "my diary"


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    """A file that vanishes while it is being packed."""
    archive, gone = tmp_path / "a.tar.gz", tmp_path / "gone"
    write_archive(archive, "top", [Item("a", b"one", "x")])
    before = archive.read_bytes()
    with pytest.raises(FileNotFoundError):
        write_archive(archive, "top", [Item("a", b"two", "x"), Item("b", gone, "x")])
    assert archive.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]
    gone.write_bytes(b"here")
    write_archive(archive, "top", [Item("a", b"two", "x"), Item("b", gone, "x")])
    assert archive.read_bytes() != before


def test_bad_input_is_one_clear_line(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.zip"
    assert "choose one of linux-arm64, web, android, ios" in fails(small, "--for", "toaster", "--out", out)
    assert "ends in .tar.gz or .zip" in fails(small, "--for", "ios", "--out", tmp_path / "a.rar")
    assert "no such bundle" in fails(tmp_path / "none", "--for", "ios", "--out", out)
    assert "it has one, two" in fails(small, "--for", "ios", "--out", out, "--target", "three")
    assert "it has fp32 (cpu), int8 (cpu)" in fails(small, "--for", "ios", "--out", out, "--precision", "int4")
    assert "leave it out for ios" in fails(small, "--for", "ios", "--out", out, "--node-modules", tmp_path)
    assert "missing; run beside" in fails(small, "--for", "web", "--out", out, "--node-modules", tmp_path)
    copy = Path(shutil.copytree(small, tmp_path / "copy", copy_function=os.link))
    file = copy / "drafter/tokenizer.json"
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-1])
    assert "drafter/tokenizer.json" in fails(copy, "--for", "ios", "--out", out)
    assert not out.exists()


def test_the_arm64_package_runs_by_itself(unpacked: dict[str, Path], small: Path) -> None:
    """On this machine's processor: sources, bundle and command are those of the package."""
    folder = unpacked["linux-arm64"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    where = "import omnidraft.tools.cli, omnidraft.runtime.engine as e; print(e.__file__)"
    found = subprocess.run([sys.executable, "-c", where], capture_output=True, text=True, env=environment, cwd=folder)
    assert Path(found.stdout.strip()).is_relative_to(folder), found.stdout + found.stderr
    command = [sys.executable, "-m", "omnidraft.tools.cli", "run", "bundle", "The old boat", "--no-state", "--json"]
    limits = ("--draft", "2", "--max-new-tokens", "12")
    done = subprocess.run([*command, *limits], capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    engine = Engine.open(small, "two", "int8", Options("2"))
    expected = engine.generate("The old boat", sampling=Sampling(), max_new_tokens=12)
    assert json.loads(done.stdout)["text"] == expected.text
    wanted = (folder / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][^ ]*", line) for line in wanted)
    assert {"onnxruntime", "numpy", "tokenizers", "jinja2"} <= {line.split("==")[0] for line in wanted}
    assert "torch" not in "".join(wanted)


def test_the_page_asks_nobody_else(unpacked: dict[str, Path]) -> None:
    folder = unpacked["web"]
    page = [path for path in folder.iterdir() if path.suffix in (".html", ".mjs", ".css")]
    assert len(page) > 10
    for path in page:
        assert not re.search(r"https?:|//[a-z]+\.[a-z]", re.sub(r"^\s*//.*$", "", path.read_text(), flags=re.M)), path
    policy = re.search(r'content="(default-src[^"]+)"', (folder / "index.html").read_text())
    assert policy is not None
    allowed = {word for part in policy[1].split(";") for word in part.split()[1:]}
    assert allowed == {"'none'", "'self'", "'wasm-unsafe-eval'", "data:"}
    assert "npm install --ignore-scripts" in (folder / "README.md").read_text()


def test_npm_packages_go_along_with_their_licences(small: Path, tmp_path: Path) -> None:
    for name, (version, licence, files) in MODULES.items():
        for file in files:
            path = tmp_path / "node_modules" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        about = {"name": name, "version": version, "license": licence}
        (tmp_path / "node_modules" / name / "package.json").write_text(json.dumps(about))
    (tmp_path / "node_modules/@huggingface/tokenizers/LICENSE").write_text("as you like")
    archive = tmp_path / "a.zip"
    pack(small, "--for", "web", "--out", archive, "--node-modules", tmp_path / "node_modules")
    folder = unpack(archive, tmp_path / "unpacked")
    imports = re.findall(r'import\("\./(node_modules/[^"]+)"\)', (folder / "page.mjs").read_text())
    assert len(imports) == 2 and set(imports) <= names(folder)
    notices = (folder / "LICENSES/NOTICES.md").read_text()
    assert "onnxruntime-web 1.30.0: MIT" in notices and "@huggingface/tokenizers 0.2.0: Apache-2.0" in notices
    assert (folder / "LICENSES/huggingface-tokenizers-LICENSE").read_text() == "as you like"
    assert "MIT" in (folder / "LICENSES/onnxruntime-web-LICENSE").read_text()  # npm's has none: the Python package's
    assert "npm install" not in (folder / "README.md").read_text()


def test_page_json_says_what_stands_around_a_message(unpacked: dict[str, Path]) -> None:
    page = json.loads((unpacked["web"] / "bundle/page.json").read_text())
    assert (page["target"], page["precision"]) == ("two", "int8")
    expected = {"parts": [1, {"before": "", "after": ""}, 2], "trim": False}
    assert page["prompts"] == {"target": expected, "drafter": expected}


def test_a_template_that_writes_the_date_is_announced(small: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(small, tmp_path / "copy"))
    dated = TEMPLATE + "{{ strftime_now('%Y') }}"
    path = copy / "targets/one/chat_template.jinja"
    path.write_text(dated)
    manifest = json.loads((copy / "manifest.json").read_text())
    entry = {"size": len(dated), "sha256": hashlib.sha256(dated.encode()).hexdigest()}
    manifest["files"]["targets/one/chat_template.jinja"] = entry
    (copy / "manifest.json").write_text(json.dumps(manifest))
    result = CliRunner().invoke(app, ["pack", str(copy), "--for", "web", "--out", str(tmp_path / "a.zip")])
    assert result.exit_code == 0 and "chat_template.jinja: writes the date" in result.stderr
    page = json.loads((unpack(tmp_path / "a.zip", tmp_path / "unpacked") / "bundle/page.json").read_text())
    assert page["prompts"]["target"]["parts"][-1] == str(datetime.now().year)


@pytest.mark.slow
def test_the_android_class_compiles_against_onnxruntime(tmp_path: Path) -> None:
    """Against classes.jar of a real AAR; it is not executed here, which would take a device."""
    package = ROOT / "tests/web/node_modules/com.github.asus4.onnxruntime"
    javac = shutil.which("javac")
    if javac is None:
        pytest.skip("javac is not installed")
    archive = next(package.rglob("onnxruntime.aar"), None) if package.is_dir() else None
    if archive is None:
        pytest.skip("no AAR: npm install --prefix tests/web --ignore-scripts com.github.asus4.onnxruntime@0.4.9")
    with zipfile.ZipFile(archive) as aar:
        jar = aar.extract("classes.jar", tmp_path)
    command = [javac, "--release", "8", "-Werror", "-Xlint:all,-options", "-cp", jar, "-d", str(tmp_path), str(HOST)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ai/omnidraft/OmniDraftModel.class").is_file()
    broken = tmp_path / HOST.name
    broken.write_text(HOST.read_text().replace("addActiveLoraAdapter", "addActiveAdapter"))
    assert subprocess.run([*command[:-1], str(broken)], capture_output=True).returncode != 0
