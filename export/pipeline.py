"""From checkpoints to a bundle: build, check, describe, and put in place at the end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from omnidraft.export import head_graph, parity, portable, qnn_profile, resources, static_profile, target
from omnidraft.export.drafter import TRAINING, build_drafter
from omnidraft.export.llama_graph import obstacle
from omnidraft.export.order import Order, check
from omnidraft.export.sources import Source, locate, resolve
from omnidraft.export.static_profile import StaticModel, write_profile
from omnidraft.export.training_graph import FILES
from omnidraft.runtime import bundle
from omnidraft.runtime.causal_model import CausalModel
from omnidraft.runtime.decoder import Decoder
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.token_bytes import TokenBytes

TOOLS = ("omnidraft", "onnx", "onnxruntime", "onnxruntime-genai", "torch", "transformers", "tokenizers", "gguf")
TOKENIZER, TEMPLATE, MAP = "tokenizer.json", "chat_template.jinja", "vocabulary.json"


class Progress(Protocol):
    """Where the pipeline says what it does."""

    def plan(self, steps: int) -> None:
        """The number of steps that will follow."""

    def step(self, what: str) -> None:
        """The next step begins."""

    def note(self, text: str) -> None:
        """Something that the user should know; work goes on."""


def export(order: Order, progress: Progress) -> None:
    """Write a bundle. It takes its place only when every graph has passed the parity gate.

    Raises OmniDraftError for what the user can mend; then, and on Ctrl-C, `out` is as it was before.
    """
    check(order)
    located = {name: locate(source) for name, source in {"": order.drafter, **order.targets}.items()}
    profiles = dict.fromkeys((*order.profiles, "static"))
    precisions = [precision for profile in profiles for precision in order.of(profile)]
    resources.require(list(located.values()), precisions, bool(order.of("static")), order.out)
    fixed = bool(order.of("static")) + len(order.compiled)
    progress.plan(2 + fixed + len(order.targets) * (2 + len(precisions)))
    partial = order.out.parent / f".{order.out.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write(order, located, partial, progress)
        _put_in_place(partial, order.out)
    except OSError as error:
        raise OmniDraftError(
            f"{error.filename or order.out}: {error.strerror or error}; the bundle was not written"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write(order: Order, located: Mapping[str, Any], root: Path, progress: Progress) -> None:
    progress.step("drafter: reading")
    source = resolve(located[""])
    _tokens(source)
    static = _static_model(order, source, "the drafter", drafter=True)
    progress.step(f"drafter: {order.drafter_precision} graph and parity")
    manifest: dict[str, Any] = {
        "schema": bundle.SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "tools": _tools() | ({"optimum-onnx": portable.OPTIMUM} if order.of("portable") else {}),
        "drafter": _drafter(source, order, static, root, progress),
        "targets": {},
    }
    for name in order.targets:
        manifest["targets"][name] = _target(name, located[name], source, order, root, progress)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    manifest["files"] = {
        path.relative_to(root).as_posix(): {"sha256": bundle.sha256(path), "size": path.stat().st_size}
        for path in files
    }
    text = json.dumps(manifest, indent=1)
    bundle.parse_manifest(text, root / bundle.MANIFEST)
    (root / bundle.MANIFEST).write_text(text, encoding="utf-8")


def _static_model(order: Order, source: Source, what: str, drafter: bool = False) -> StaticModel | None:
    """What static graphs are made of, None where none are wanted. Raises OmniDraftError before there is any work."""
    if not order.of("static"):
        return None
    rank = static_profile.RANK if drafter and obstacle(source.config) is None else 0
    model = StaticModel(source, what, drafter, order.context or static_profile.CONTEXT, rank, order.threads)
    model.check()
    return model


def _drafter(
    source: Source, order: Order, static: StaticModel | None, root: Path, progress: Progress
) -> dict[str, Any]:
    folder, precision = root / "drafter", order.drafter_precision
    folder.mkdir()
    hindrance = obstacle(source.config)
    if hindrance is None:
        lora = build_drafter(source, precision, folder)
    else:
        progress.note(f"the drafter cannot learn on the device: {hindrance}; onnxruntime-genai builds its graph")
        lora = None
        _copy_graph(target.build_target(source, precision, hidden_states=True), folder)
    if not head_graph.build_head(source.folder, int(source.config["hidden_size"]), folder):
        progress.note("the drafter's acceptance head is untrained, it believes the drafter; see omnidraft train-head")
    figures = _gate(Decoder(folder / target.MODEL, order.threads), source, precision, "the drafter", order.threads)
    graphs = []
    if static is not None:
        graphs = _fixed(order, static, root, "drafter", ["fp32"], lambda what: progress.step(f"drafter: {what}"))
    return {
        **_describe(source, folder, "drafter"),
        "model": f"drafter/{target.MODEL}",
        "precision": precision,
        "trainable": lora is not None,
        "lora": lora,
        "head": {"graph": f"drafter/{head_graph.GRAPH}", "weights": f"drafter/{head_graph.WEIGHTS}"},
        "training": None if lora is None else {part: f"drafter/{TRAINING}/{name}" for part, name in FILES.items()},
        "parity": figures,
        "opset": _opset(folder / target.MODEL),
        "graphs": graphs,
    }


def _target(name: str, located: Any, drafter: Source, order: Order, root: Path, progress: Progress) -> dict[str, Any]:
    progress.step(f"{name}: reading" if located.kind == "huggingface" else f"{name}: reading, converting")
    source, graphs = resolve(located), []
    _tokens(source)
    static = _static_model(order, source, f"target {name!r}")
    for precision in order.of("cpu"):
        progress.step(f"{name}: {precision} graph and parity")
        folder = root / "targets" / name / f"cpu-{precision}"
        folder.mkdir(parents=True)
        _copy_graph(target.build_target(source, precision), folder)
        decoder = Decoder(folder / target.MODEL, order.threads)
        graphs.append(
            {
                "profile": "cpu",
                "precision": precision,
                "model": f"targets/{name}/cpu-{precision}/{target.MODEL}",
                "parity": _gate(decoder, source, precision, f"target {name!r}", order.threads),
                "quantization": target.QUANTIZATION[precision],
                "opset": _opset(folder / target.MODEL),
            }
        )
    if order.of("portable"):
        progress.step(f"{name}: portable graph and parity")
        where = f"targets/{name}/portable-fp32"
        graphs.append(portable.write_profile(source, root, where, f"target {name!r}", order.threads))
    if static is not None:
        graphs += _fixed(
            order, static, root, f"targets/{name}", order.of("static"), lambda what: progress.step(f"{name}: {what}")
        )
    described = _describe(source, root / "targets" / name, f"targets/{name}")
    progress.step(f"{name}: vocabulary map")
    _map(drafter, source, root / "targets" / name / MAP)
    return {**described, "map": f"targets/{name}/{MAP}", "graphs": graphs}


def _fixed(
    order: Order,
    static: StaticModel,
    root: Path,
    folder: str,
    precisions: Sequence[str],
    step: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Static graphs, and what is compiled from them; without the former where nobody asked for them."""
    made = write_profile(static, root / folder, folder, precisions, step)
    compiled = qnn_profile.write_profiles(static, made, root, folder, order.compiled, step)
    if "static" in order.profiles:
        return made + compiled
    for entry in made:
        shutil.rmtree((root / entry["model"]).parent)
    return compiled


def _describe(source: Source, folder: Path, relative: str) -> dict[str, Any]:
    """Copy tokenizer and template; what the manifest says of a model whatever its part."""
    shutil.copyfile(source.tokenizer, folder / TOKENIZER)
    if source.chat_template is not None:
        (folder / TEMPLATE).write_text(source.chat_template, encoding="utf-8", newline="")
    return {
        "architecture": source.architecture,
        "source": {"name": source.name, "kind": source.kind},
        "weights_sha256": source.weights_sha256,
        "tokenizer": f"{relative}/{TOKENIZER}",
        "tokenizer_sha256": bundle.sha256(folder / TOKENIZER),
        "chat_template": None if source.chat_template is None else f"{relative}/{TEMPLATE}",
        "bos": source.bos,
        "template_tokens": source.template_tokens,
        "stop_ids": list(source.stop_ids),
        "vocabulary": source.vocabulary,
        "context": source.context,
        "license": source.license,
    }


def _gate(decoder: CausalModel, source: Source, precision: str, what: str, threads: int) -> dict[str, Any]:
    figures = parity.measure(decoder, parity.reference(source, threads), source.context)
    parity.require(figures, precision, what)
    return figures


def _map(drafter: Source, source: Source, path: Path) -> None:
    from omnidraft.runtime.vocabulary import build_map, save_map

    found = build_map(_tokens(drafter), _tokens(source))
    save_map(found, path, bundle.sha256(drafter.tokenizer), bundle.sha256(source.tokenizer))


def _tokens(source: Source) -> TokenBytes:
    """Also called as soon as a checkpoint is read: what the runtime cannot use should not cost minutes of export."""
    tokens = TokenBytes.from_file(source.tokenizer)
    tokens.fit(source.vocabulary)
    return tokens


def _copy_graph(made: Path, folder: Path) -> None:
    for name in (target.MODEL, target.DATA):
        if (made / name).is_file():
            shutil.copyfile(made / name, folder / name)


def _opset(model: Path) -> int:
    import onnx

    imports = onnx.load(model, load_external_data=False).opset_import
    return next(int(entry.version) for entry in imports if entry.domain == "")


def _tools() -> dict[str, str]:
    found = {}
    for name in TOOLS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _put_in_place(partial: Path, out: Path) -> None:
    """Rename a finished folder over an old bundle, which comes back if that fails."""
    old = out.parent / f".{out.name}.old-{os.getpid()}"
    if out.exists():
        out.rename(old)
    try:
        partial.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
