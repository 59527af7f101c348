"""Where a graph runs: the provider that was asked for, checked node by node, or the CPU and the reason.

ONNX Runtime falls back in silence: where a provider's library is missing, or the provider does not start, or takes
none of the nodes, the graph runs on the CPU while `get_providers()` may still name the other. So the Python binding's
second try is switched off, `--strict-ep` forbids the CPU to ONNX Runtime itself, and what a report says is counted
from the nodes that each provider was given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import onnxruntime as ort
from onnxruntime.capi import _pybind_state as binding

from omnidraft.runtime.bundle import PROFILES
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.graph_inputs import dynamic_inputs
from omnidraft.runtime.ort_format import is_ort_format
from omnidraft.runtime.placed import CPU, RECORD, Placed, count
from omnidraft.runtime.qnn import qnn_settings, soc_model

LEFT = "fallback to CPU EP"  # is in what ONNX Runtime says where the CPU would be given nodes and may not


@dataclass(frozen=True)
class Provider:
    """An execution provider as ONNX Runtime calls it.

    `package`: the plug-in that brings it, "" if it is part of some builds of ONNX Runtime only; `remedy`: how to get
    it; `static`: it runs fixed shapes only; `settings`: what it is given unless a wish says otherwise; `session`: what
    its sessions are told.
    """

    name: str
    remedy: str = ""
    package: str = ""
    static: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    session: Mapping[str, str] = field(default_factory=dict)


PROVIDERS = {
    "cpu": Provider(CPU),
    # Sessions on graphs that were compiled into one binary load it once.
    "qnn": Provider("QNNExecutionProvider", "pip install onnxruntime-qnn", "onnxruntime-qnn", True, qnn_settings(),
                    {"ep.share_ep_contexts": "1"}),
    "nnapi": Provider("NnapiExecutionProvider", "take an ONNX Runtime for Android, or --ep cpu", static=True),
    "xnnpack": Provider("XnnpackExecutionProvider", "take an ONNX Runtime for Android or iOS, or --ep cpu"),
    "openvino": Provider("OpenVINOExecutionProvider", "pip install onnxruntime-ep-openvino", "onnxruntime-ep-openvino"),
    "webgpu": Provider("WebGpuExecutionProvider", "pip install onnxruntime-ep-webgpu", "onnxruntime-ep-webgpu"),
    "coreml": Provider("CoreMLExecutionProvider", "take an ONNX Runtime for macOS or iOS, or --ep cpu"),
}  # fmt: skip
NAMES = ("auto", *PROVIDERS)


class Unavailable(Exception):
    """Why a provider is not to be had on this device, and what would help, in one line."""


class Refused(OmniDraftError):
    """A strict wish that cannot be met. `reason`: the line without what was asked for."""

    def __init__(self, what: Path, ep: str, reason: str) -> None:
        super().__init__(f"{what}: asked for {ep}, {reason}; without --strict-ep the CPU helps out")
        self.reason = reason


@dataclass(frozen=True)
class Wish:
    """Where a graph shall run: one of NAMES ("auto" is the CPU unless the graph was made for something else).

    `strict`: not at all rather than partly elsewhere; `settings`: options of the provider; `profile`: which of a
    bundle's graphs to take, "auto" for those that suit the provider.
    """

    ep: str = "auto"
    strict: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    profile: str = "auto"

    def __post_init__(self) -> None:
        """Raises OmniDraftError for a name that is not known."""
        if self.ep not in NAMES:
            raise OmniDraftError(f"--ep {self.ep}: no such provider; choose {', '.join(NAMES)}")
        if self.profile not in ("auto", *PROFILES):
            raise OmniDraftError(f"--profile {self.profile}: no such profile; choose auto, {', '.join(PROFILES)}")

    @property
    def provider(self) -> Provider:
        """What the name stands for; auto takes the CPU."""
        return PROVIDERS["cpu" if self.ep == "auto" else self.ep]

    @property
    def profiles(self) -> tuple[str, ...]:
        """Profiles that will do, the one that suits the provider first."""
        if self.profile != "auto":
            return (self.profile,)
        return tuple(sorted(PROFILES, key=lambda profile: (profile == "static") != self.provider.static))


@dataclass(frozen=True)
class Wishes:
    """Where target and drafter shall run."""

    target: Wish = Wish()
    drafter: Wish = Wish()


def read_wishes(text: str, strict: bool = False, profile: str = "auto") -> Wishes:
    """`NAME` for both models, or `target=NAME,drafter=NAME`, of which either may be left out; `qnn:SOC` names the SoC.

    Raises OmniDraftError for anything else.
    """
    for_drafter = "cpu" if profile == "portable" else profile  # no portable graph has hidden states and LoRA inputs
    if "=" not in text:
        return Wishes(_read_wish(text, strict, profile), _read_wish(text, strict, for_drafter))
    found: dict[str, Wish] = {}
    for part in text.split(","):
        model, _, ep = (word.strip() for word in part.partition("="))
        if model not in ("target", "drafter") or model in found:
            raise OmniDraftError(f"--ep {text}: give one name, or target=NAME,drafter=NAME")
        found[model] = _read_wish(ep, strict, profile if model == "target" else for_drafter)
    # What the other model is left to is no wish of the user's, but --strict-ep and --profile hold for it too.
    return Wishes(
        found.get("target", Wish(strict=strict, profile=profile)),
        found.get("drafter", Wish(strict=strict, profile=for_drafter)),
    )


def _read_wish(text: str, strict: bool, profile: str) -> Wish:
    ep, _, soc = text.partition(":")
    if soc and ep != "qnn":
        raise OmniDraftError(f"--ep {text}: only qnn has SoCs to choose from, as in qnn:SM8650")
    return Wish(ep, strict, {"soc_model": str(soc_model(soc))} if soc else {}, profile)


def session_options(threads: int) -> ort.SessionOptions:
    """Options of every session here. Spinning threads fight each other on a machine that does anything else."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # a plan would be kept for every shape, and nearly every pass has a new one
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def open_session(
    model: Path, make_options: Callable[[], ort.SessionOptions], wish: Wish
) -> tuple[ort.InferenceSession, Placed]:
    """A session for a graph, and where it runs: as wished, or on the CPU with the reason in `Placed.why`.

    `make_options` is called for every try. Raises OmniDraftError if the graph cannot be loaded at all, if a strict
    wish cannot be met, or if the provider is there and the graph is not of its kind.
    """
    if wish.provider.name == CPU:
        return _on_cpu(model, make_options, wish)
    try:
        session = _on_wished(model, make_options, wish)
    except Unavailable as reason:
        if not wish.strict:
            return _on_cpu(model, make_options, wish, f"on the CPU because {reason}")
        raise Refused(model, wish.ep, str(reason)) from None
    placed = count(session, wish.ep, wish.provider.name)
    if wish.strict and placed.why:
        raise Refused(model, wish.ep, placed.why)
    return session, replace(placed, why=f"{placed.why}; --strict-ep refuses that") if placed.why else placed


def devices(ep: str) -> list[Any]:
    """ONNX Runtime's devices of a plug-in provider, which is registered at the first call; none for a built-in one.

    Raises Unavailable if the provider is not there, or has no device here.
    """
    provider = PROVIDERS[ep]
    # A plug-in that is registered counts as available, and is a stranger to a session without its devices.
    found = known_devices(provider) if provider.package else []
    if found or provider.name in ort.get_available_providers():
        return found
    if not provider.package:
        raise Unavailable(f"this ONNX Runtime has no {provider.name}: {provider.remedy}")
    _register(ep)
    found = known_devices(provider)
    if not found:
        raise Unavailable(f"{provider.package} finds no device here that it could use; --ep cpu needs none")
    return found


@cache
def _register(ep: str) -> None:
    provider = PROVIDERS[ep]
    try:
        plugin = import_module(provider.package.replace("-", "_"))
        ort.register_execution_provider_library(provider.name, plugin.get_library_path())
    except ModuleNotFoundError:
        raise Unavailable(f"{provider.package} is not installed: {provider.remedy}") from None
    except Exception as error:  # a library that does not load, or was made for another ONNX Runtime
        raise Unavailable(f"{provider.package} cannot be used ({first_line(error)}): {provider.remedy} anew") from None


def known_devices(provider: Provider) -> list[Any]:
    """Pairs of a provider and a device that ONNX Runtime knows of, plug-ins that are registered included."""
    return [device for device in ort.get_ep_devices() if device.ep_name == provider.name]


def compatibility(model: Path, ep: str) -> tuple[str, str]:
    """What a compiled graph says it was made for, and ONNX Runtime's verdict on it for the devices here.

    Both "" where the graph says nothing. Raises Unavailable.
    """
    made_for = binding.get_compatibility_info_from_model(str(model), PROVIDERS[ep].name)
    if made_for is None:
        return "", ""
    try:
        return made_for, binding.get_model_compatibility_for_ep_devices(devices(ep), made_for).name
    except RuntimeError:  # QNN's, where no device is an NPU: its simulator
        return made_for, "EP_NOT_APPLICABLE"


def _on_wished(model: Path, make_options: Callable[[], ort.SessionOptions], wish: Wish) -> ort.InferenceSession:
    """Raises Unavailable if the provider is not there or does not start, OmniDraftError for the wrong kind of graph."""
    provider = wish.provider
    if is_ort_format(model):  # what is not recorded cannot be reported
        raise Unavailable("ONNX Runtime records no nodes of a graph in ORT format: pack without --ort-format")
    dynamic = dynamic_inputs(model) if provider.static else []
    kind = f"{wish.ep} runs fixed shapes only, and that of {dynamic[0]!r} is not fixed" if dynamic else ""
    try:
        found = devices(wish.ep)
    except Unavailable as reason:
        raise Unavailable(f"{reason}; besides, {kind}" if kind else str(reason)) from None
    if kind:
        raise OmniDraftError(f"{model}: {kind}; use --ep cpu, or export with --profile cpu,static")
    try:
        return _create(model, make_options(), wish, wish.strict, found)
    except Exception as error:  # ONNX Runtime raises many types, all with one message
        left = _left_to_others(model, make_options, wish, found) if LEFT in str(error) else ""
        raise Unavailable(left or f"{provider.name} does not take it ({first_line(error)}): use --ep cpu") from None


def _left_to_others(
    model: Path, make_options: Callable[[], ort.SessionOptions], wish: Wish, found: Sequence[Any]
) -> str:
    """Which nodes a strict session was refused for: ONNX Runtime does not say, and one that is not strict is asked."""
    try:
        return count(_create(model, make_options(), wish, False, found), wish.ep, wish.provider.name).why
    except Exception:  # ONNX Runtime raises many types; what it said of the strict session stands
        return ""


def _create(
    model: Path, options: ort.SessionOptions, wish: Wish, strict: bool, found: Sequence[Any] = ()
) -> ort.InferenceSession:
    """A session that counts nodes. `found`: the devices of a plug-in."""
    provider, settings = wish.provider, {**wish.provider.settings, **wish.settings}
    for key, value in provider.session.items():
        options.add_session_config_entry(key, value)
    options.add_session_config_entry(RECORD, "1")
    if strict:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if found:
        options.add_provider_for_devices(found, settings)
        return ort.InferenceSession(model, options, enable_fallback=0)
    # The CPU is not named beside another: ONNX Runtime adds it, and a strict session may not have it named.
    return ort.InferenceSession(model, options, providers=[(provider.name, settings)], enable_fallback=0)


def _on_cpu(
    model: Path, make_options: Callable[[], ort.SessionOptions], wish: Wish, why: str = ""
) -> tuple[ort.InferenceSession, Placed]:
    try:
        session = _create(model, make_options(), Wish("cpu"), False)
    except Exception as error:  # ONNX Runtime raises many types, all with one message
        raise OmniDraftError(f"{model}: ONNX Runtime cannot load it ({first_line(error)}); export again") from None
    return session, count(session, wish.ep, CPU, why)


def first_line(error: Exception) -> str:
    """What an exception of ONNX Runtime says, short enough for a line that says more."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r".*\[ONNXRuntimeError\] : \d+ : \w+ : ", "", line)[:200]
