"""The acceptance head: how likely the target is to accept the next proposal, from what drafting knows anyway."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.features import FEATURES
from omnidraft.runtime.placement import session_options

HEAD_FILE = "acceptance_head.onnx_adapter"  # in a drafter's folder: what its head has learned
HEAD_PREFIX = "acceptance."
WIDTH = 64  # of the hidden layer


def shapes(hidden_size: int) -> dict[str, tuple[int, int]]:
    """The head's parameters, all float32, for a drafter with hidden states [H]. With x = [hidden, features]:

    z = silu(x · w1 + b1) · w2 + features · skip + b2.
    """
    return {
        "acceptance.w1": (hidden_size + len(FEATURES), WIDTH),
        "acceptance.b1": (1, WIDTH),
        "acceptance.w2": (WIDTH, 1),
        "acceptance.skip": (len(FEATURES), 1),
        "acceptance.b2": (1, 1),
    }


def neutral(hidden_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A head that believes the drafter: its z is the feature "logit". Random w1 of variance 1 / in, ready to learn."""
    parameters = {name: np.zeros(shape, np.float32) for name, shape in shapes(hidden_size).items()}
    w1 = parameters["acceptance.w1"]
    w1[:] = np.random.default_rng(seed).standard_normal(w1.shape, np.float32) / np.sqrt(w1.shape[0])
    parameters["acceptance.skip"][0] = 1
    return parameters


def check(parameters: Mapping[str, np.ndarray], hidden_size: int | None = None) -> None:
    """Raises OmniDraftError if these are not a head's parameters; `hidden_size` None: for any drafter."""
    if hidden_size is None:
        w1 = parameters.get("acceptance.w1")
        hidden_size = 1 if w1 is None or w1.ndim != 2 else max(1, w1.shape[0] - len(FEATURES))
    for name, shape in shapes(hidden_size).items():
        if name not in parameters:
            raise OmniDraftError(f"acceptance head: {name} is missing; train it again")
        value = parameters[name]
        if value.shape != shape:
            raise OmniDraftError(
                f"acceptance head: {name} has shape {list(value.shape)}, not {list(shape)}: "
                "it belongs to another drafter; train one for this drafter"
            )
        if not np.isfinite(value).all():
            raise OmniDraftError(f"acceptance head: {name} has numbers that are not finite; train it again")
    unknown = sorted(set(parameters) - set(shapes(hidden_size)))
    if unknown:
        raise OmniDraftError(f"acceptance head: {unknown[0]} is not part of one; give the head's parameters only")


class AcceptanceHead:
    """Runs head.onnx for one proposal at a time, on arrays that stay bound. `hidden_size` is H.

    It gives z, the logit, and the caller takes 1 / (1 + exp(-z)): a bias is added to z before that.
    """

    def __init__(self, model: Path) -> None:
        """Load a graph. Raises OmniDraftError if ONNX Runtime cannot, or if it is not an acceptance head."""
        try:
            self._session = ort.InferenceSession(model, session_options(1), providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises many types, all with one message
            reason = str(error).splitlines()[0]
            raise OmniDraftError(f"{model}: ONNX Runtime cannot load it ({reason}); export again") from None
        inputs = {i.name: i.shape for i in self._session.get_inputs()}
        learned = {i.name: tuple(i.shape) for i in self._session.get_overridable_initializers()}
        size = learned.get("acceptance.w1", (0,))[0] - len(FEATURES)
        if (
            inputs != {"hidden": ["n", size], "features": ["n", len(FEATURES)]}
            or learned != shapes(size)
            or {o.name: o.shape for o in self._session.get_outputs()} != {"logit": ["n"]}
        ):
            raise OmniDraftError(f"{model}: not an acceptance head of this version of OmniDraft; export again")
        self.hidden_size = size
        self._hidden = np.zeros((1, size), np.float32)
        self._features = np.zeros((1, len(FEATURES)), np.float32)
        self._logit = np.zeros(1, np.float32)
        self._arrays = {
            name: ort.OrtValue.ortvalue_from_numpy(array)  # shares the array's memory
            for name, array in (("hidden", self._hidden), ("features", self._features), ("logit", self._logit))
        }
        self._source: Mapping[str, np.ndarray] | None = None
        self.use(None)

    def use(self, parameters: Mapping[str, np.ndarray] | None) -> None:
        """Take learned parameters (see `shapes`) from now on, or for None those of the graph.

        The mapping in use already is no work. Raises OmniDraftError if they do not fit; those in use stay then.
        """
        if parameters is self._source and parameters is not None:
            return
        if parameters is not None:
            check(parameters, self.hidden_size)
        self._source = parameters
        self._parameters = {
            name: ort.OrtValue.ortvalue_from_numpy(np.array(value, np.float32, order="C"))  # a copy: it shares that
            for name, value in (parameters or {}).items()
        }
        binding: Any = self._session.io_binding()
        for name in ("hidden", "features"):
            binding.bind_ortvalue_input(name, self._arrays[name])
        binding.bind_ortvalue_output("logit", self._arrays["logit"])
        for name, value in self._parameters.items():
            binding.bind_ortvalue_input(name, value)
        self._binding = binding

    def logit(self, hidden: np.ndarray, features: np.ndarray) -> float:
        """z of one proposal: the drafter's float32 hidden [H] before it, and float32 features [F], as in FEATURES.

        Raises OmniDraftError if ONNX Runtime fails.
        """
        self._hidden[0] = hidden
        self._features[0] = features
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime raises many types, all with one message
            raise OmniDraftError(f"the acceptance head failed in a pass ({str(error).splitlines()[0]})") from None
        return float(self._logit[0])
