"""Which peers a bench is asked to run, what each of them loads, and why one of them takes no part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.peers.peer import Peer
from omnidraft.tools.peers.talk import Request, Worker

OURS = "onnxruntime"  # plain decoding on it is a row of every bench
TRIAL = 2  # tokens
GGUF_TYPES = {"int8": "Q8_0", "fp32": "F32"}  # of a precision; at any other, the file as it is


@dataclass(frozen=True)
class Plan:
    """How to start a peer: the name of its row, its program, and what that opens."""

    row: str
    program: str
    settings: dict[str, Any]
    assisted: bool = False


@dataclass(frozen=True)
class Opened:
    """Peers by the name of their row, and the reason for each that takes no part."""

    peers: dict[str, Peer]
    absent: dict[str, str]

    def close(self) -> None:
        """End their processes."""
        for peer in self.peers.values():
            peer.close()


def read_against(names: str) -> list[str]:
    """The peers of a list with commas. Raises OmniDraftError for an unknown one."""
    known = (OURS, *PLANS)
    found = [name.strip() for name in names.split(",")]
    for name in found:
        if name not in known:
            raise OmniDraftError(f"--against {name}: choose from {', '.join(known)}")
    return [name for name in found if name != OURS]


def open_peers(
    names: Sequence[str], engine: Engine, sampling: Sampling, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Opened:
    """Start each peer on the engine's target, and try it with the first of the prompts, which are token ids."""
    opened, longest = Opened({}, {}), max(map(len, prompts)) + max_new_tokens
    for name in names:
        try:
            plan = PLANS[name](engine, sampling, longest)
            opened.peers[plan.row] = Peer(engine, _start(name, plan, engine, sampling, prompts[0]), plan.assisted)
        except OmniDraftError as error:
            opened.absent[name] = str(error).removeprefix(f"{name}: ")
    return opened


def _start(name: str, plan: Plan, engine: Engine, sampling: Sampling, prompt: Sequence[int]) -> Worker:
    command = ["-m", f"{__package__}.{plan.program}"]
    worker = Worker(name, command, {**plan.settings, "threads": engine.pair.threads})
    try:
        worker.ask(Request(list(prompt), TRIAL, vars(sampling)))
    except BaseException:
        worker.close()
        raise
    return worker


def _genai(engine: Engine, sampling: Sampling, longest: int) -> Plan:
    from omnidraft.tools.peers.genai_config import genai_config

    _need("onnxruntime_genai", "onnxruntime-genai")
    if sampling.min_p > 0:
        raise OmniDraftError("onnxruntime-genai knows no min-p; leave --min-p out")
    pair = engine.pair
    graph = pair.bundle.path.resolve() / pair.target.graph.model
    return Plan("onnxruntime-genai", "run_genai", {"graph": str(graph), "config": genai_config(pair.target)})


def _transformers(engine: Engine, sampling: Sampling, longest: int) -> Plan:
    from omnidraft.tools.peers.checkpoints import folder_of

    _need("transformers", '-e ".[export]"')
    pair = engine.pair
    settings = {"target": str(folder_of(pair.target.info)), "drafter": None, "stop_ids": pair.target.info.stop_ids}
    return Plan("transformers, fp32", "run_transformers", settings)


def _assisted(engine: Engine, sampling: Sampling, longest: int) -> Plan:
    from omnidraft.tools.peers.checkpoints import folder_of

    plain = _transformers(engine, sampling, longest)
    rule = "UAD" if sampling.temperature == 0 else "TLI"  # transformers chooses by this
    settings = {**plain.settings, "drafter": str(folder_of(engine.pair.bundle.drafter))}
    return Plan(f"transformers {rule}, fp32", plain.program, settings, assisted=True)


def _llama_cpp(engine: Engine, sampling: Sampling, longest: int) -> Plan:
    from omnidraft.tools.peers.checkpoints import gguf_of
    from omnidraft.tools.peers.gguf_types import converted, type_of

    _need("xllamacpp", "xllamacpp")
    file, kind = gguf_of(engine.pair.target.info), GGUF_TYPES.get(engine.pair.precision)
    if kind is not None:
        file = converted(file, kind)
    return Plan(f"llama.cpp, {kind or type_of(file)}", "run_llama_cpp", {"model": str(file), "context": longest})


def _need(module: str, package: str) -> None:
    if find_spec(module) is None:
        raise OmniDraftError(f"{module} is not installed; pip install -c constraints.txt {package}")


PLANS: dict[str, Callable[[Engine, Sampling, int], Plan]] = {
    "genai": _genai,
    "transformers": _transformers,
    "transformers-assisted": _assisted,
    "llama.cpp": _llama_cpp,
}
