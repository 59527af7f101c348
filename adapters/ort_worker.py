"""The process that trains with onnxruntime-training: `PYTHON -I -S ort_worker.py PACKAGES`, commands on its pipes.

Its runtime must not share a process, or a package folder, with the onnxruntime that OmniDraft runs on. So this is a
script that sees the standard library and PACKAGES only, in the syntax of Python 3.8, and `ort_training` talks to it.

A message is its length (8 bytes, little-endian) and that many bytes of an .npz file: "command" and its arguments go
in, results or one line of "error" come out. The process ends when its standard input does.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import os
import re
import struct
import sys
import tempfile
import types
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Dict, Mapping  # noqa: UP035  Python 3.8 evaluates Message

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    try:
        import numpy as np
    except ImportError:  # with a page of advice
        found = f"{sys.version_info[0]}.{sys.version_info[1]}"
        sys.exit(f"{sys.argv[1]} is not complete, or not for Python {found}; run omnidraft setup-training")
import numpy as np

Message = Dict[str, Any]  # noqa: UP006

FILES = TRAINING, OPTIMIZER, CHECKPOINT, WEIGHTS = (
    "training_model.onnx",
    "optimizer_model.onnx",
    "checkpoint",
    "weights.json",
)
MOST_BYTES = 1 << 32
NEWEST_IR = 10  # that onnxruntime-training 1.19.2 reads
ADAMW = {"eps": 1e-8, "weight_decay": 0.01, "betas": (0.9, 0.999)}  # those of step.onnx
TORCHS_ADAMW = 0  # adam_mode; 1 is that of Hugging Face's old optimizer
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGE = 32 << 20  # the most that glibc takes for M_MMAP_THRESHOLD


def send(stream: IO[bytes], message: Mapping[str, Any]) -> None:
    """Write one message: arrays, or what numpy makes an array of without pickle."""
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {name: np.asarray(value) for name, value in message.items()}
    assert not any(array.dtype.hasobject for array in arrays.values())  # numpy would pickle it
    np.savez(buffer, **arrays)
    data = buffer.getvalue()
    stream.write(struct.pack("<Q", len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> Message:
    """Read one message. Raises EOFError where the other side is gone."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    size = struct.unpack("<Q", head)[0]
    if size > MOST_BYTES:
        raise EOFError  # not one of our messages
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def glibc(function: str, *arguments: int) -> None:
    """Call one of glibc's functions for its heap; other C libraries are left to themselves."""
    with suppress(OSError, TypeError, AttributeError):  # Windows, macOS, musl
        getattr(ctypes.CDLL(None), function)(*arguments)


def training_module(name: str) -> Any:
    """A module of onnxruntime.training, whose __init__ imports optim, which needs torch; we need neither."""
    unwanted = {"amp", "artifacts", "optim"} - {name}  # artifacts imports onnx, which steps do without
    for other in unwanted:
        path = "onnxruntime.training." + other
        sys.modules.setdefault(path, types.ModuleType(path))
    return importlib.import_module("onnxruntime.training." + name)


def prepare(message: Message) -> Message:
    """Write what training needs into `folder`, from the graph `loss`, for LoRA of `rank`, clipping to norm `clip`.

    The frozen weights become inputs of the training graph: neither it nor the checkpoint holds a copy of them.
    """
    artifacts = training_module("artifacts")
    import onnx
    from onnxruntime.training import onnxblock

    folder = Path(str(message["folder"]))
    model = onnx.load(str(message["loss"]), load_external_data=False)
    graph = model.graph
    weights = {}
    for tensor in [t for t in graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]:
        where = {entry.key: entry.value for entry in tensor.external_data}
        kind = str(np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)))
        weights[tensor.name] = [where["location"], int(where["offset"]), kind, list(tensor.dims)]
        graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        graph.initializer.remove(tensor)
    learned = [value for value in graph.input if value.name.endswith((".lora_A", ".lora_B"))]
    for value in learned:
        shape = [size.dim_value or int(message["rank"]) for size in value.type.tensor_type.shape.dim]
        graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape, np.float32), value.name))
        graph.input.remove(value)
    clip = onnxblock.optim.ClipGradNorm(float(message["clip"]))
    artifacts.generate_artifacts(
        model,
        requires_grad=[value.name for value in learned],
        optimizer=onnxblock.optim.AdamW(clip_grad=clip, **ADAMW),
        artifact_directory=str(folder),
    )
    (folder / "eval_model.onnx").unlink()
    optimizer = onnx.load(str(folder / OPTIMIZER))
    for node in optimizer.graph.node:
        for attribute in node.attribute:
            if attribute.name == "adam_mode":
                attribute.i = TORCHS_ADAMW
    for name, proto in ((OPTIMIZER, optimizer), (TRAINING, onnx.load(str(folder / TRAINING)))):
        proto.ir_version = min(proto.ir_version, NEWEST_IR)
        onnx.save(proto, str(folder / name))
    (folder / WEIGHTS).write_text(json.dumps(weights), encoding="utf-8")
    return {}


class Session:
    """One drafter in training."""

    def __init__(self, message: Message) -> None:
        """From the `folder` that `prepare` wrote, frozen weights in `weights`; `names` orders the LoRA vector."""
        import onnxruntime

        self._onnxruntime, self._api = onnxruntime, training_module("api")
        self._folder, self._names = Path(str(message["folder"])), [str(name) for name in message["names"]]
        self._options = onnxruntime.SessionOptions()
        self._options.intra_op_num_threads = int(message["threads"])
        self._options.inter_op_num_threads = 1
        self._options.log_severity_level = 3
        # As in onnx_step. The heap keeps the memory of a step for the next one, as an arena would, but only until
        # `save` gives it back; given back after each step, it would make steps a quarter slower.
        self._options.enable_mem_pattern = self._options.enable_cpu_mem_arena = False
        glibc("mallopt", M_MMAP_THRESHOLD, LARGE)
        glibc("mallopt", M_TRIM_THRESHOLD, 1 << 30)
        self._options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._weights = self._map(Path(str(message["weights"])))
        self._begin(self._folder / CHECKPOINT)

    def _map(self, folder: Path) -> dict[str, Any]:
        """The frozen weights, as views of their files: copy-on-write, so the files stay as they are."""
        files: dict[str, Any] = {}
        found = {}
        described = json.loads((self._folder / WEIGHTS).read_text(encoding="utf-8"))
        for name, (location, offset, kind, shape) in described.items():
            if location not in files:
                files[location] = np.memmap(str(folder / location), np.uint8, "c")
            size = int(np.prod(shape)) * np.dtype(kind).itemsize
            if offset + size > len(files[location]):
                raise ValueError(f"{folder / location} is too short")
            view = files[location][offset : offset + size].view(kind).reshape(shape)
            found[name] = self._onnxruntime.OrtValue.ortvalue_from_numpy(view)
        return found

    def _begin(self, checkpoint: Path) -> None:
        self._state = self._api.CheckpointState.load_checkpoint(str(checkpoint))
        self._module = self._api.Module(str(self._folder / TRAINING), self._state, session_options=self._options)
        self._optimizer = self._api.Optimizer(str(self._folder / OPTIMIZER), self._module)
        self._inputs = self._module.input_names()

    def load(self, message: Message) -> Message:
        """Go on from `lora` and the bytes of a `checkpoint` with the moments; none: they begin anew."""
        data = message["checkpoint"].tobytes()
        if data:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / CHECKPOINT
                path.write_bytes(data)
                self._begin(path)
        else:
            self._begin(self._folder / CHECKPOINT)
        at = 0
        for name in self._names:
            parameter = self._state.parameters[name]
            shape = parameter.data.shape
            size = int(np.prod(shape))
            parameter.data = np.ascontiguousarray(message["lora"][at : at + size].reshape(shape), np.float32)
            at += size
        return {}

    def save(self, _message: Message) -> Message:
        """The `checkpoint` that `load` takes. A round of steps ends with it, so free memory goes back to the system."""
        glibc("malloc_trim", 0)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / CHECKPOINT
            self._api.CheckpointState.save_checkpoint(self._state, str(path), include_optimizer_state=True)
            return {"checkpoint": np.frombuffer(path.read_bytes(), np.uint8)}

    def step(self, message: Message) -> Message:
        """One step at `rate` on the batch that is in the message too; `loss` before it, `lora` after it."""
        try:
            loss = self._forward(message)
            self._optimizer.set_learning_rate(float(message["rate"]))
            self._optimizer.step()
        finally:
            self._module.lazy_reset_grad()
        return {"loss": loss, "lora": self._vector("data")}

    def gradient(self, message: Message) -> Message:
        """The `gradient` of the batch in the message; nothing changes."""
        try:
            self._forward(message)
            return {"gradient": self._vector("grad")}
        finally:
            self._module.lazy_reset_grad()

    def _forward(self, message: Message) -> float:
        value = self._onnxruntime.OrtValue.ortvalue_from_numpy
        feeds = [self._weights[n] if n in self._weights else value(message[n]) for n in self._inputs]
        return float(self._module(*feeds).numpy())

    def _vector(self, what: str) -> Any:
        return np.concatenate([getattr(self._state.parameters[name], what).ravel() for name in self._names])


def versions(_message: Message) -> Message:
    """What is installed, after importing all that training needs."""
    import onnx
    import onnxruntime

    training_module("artifacts")
    training_module("api")
    return {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__, "numpy": np.__version__}


def line(error: Exception) -> str:
    """What an exception says, without the path and the signature that ONNX Runtime puts in front."""
    text = repr(error) if isinstance(error, KeyError) else str(error)
    lines = text.strip().splitlines() or [type(error).__name__]
    return re.sub(r"^.*\[ONNXRuntimeError\] : \d+ : ", "", lines[0])


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """Answer commands until the other side is gone."""
    session = None
    while True:
        try:
            message = receive(source)
        except EOFError:
            return
        command = str(message.pop("command"))
        try:
            if command == "open":
                session, answer = Session(message), {}
            elif session is None:
                answer = {"versions": versions, "prepare": prepare}[command](message)
            else:
                answer = getattr(session, command)(message)
        except Exception as error:  # ONNX Runtime raises many types
            answer = {"error": line(error)}
        send(sink, answer)


def main() -> None:
    """Serve on the standard streams."""
    # Native code writes log lines to descriptor 1: give it the error stream, and keep a copy for answers.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        serve(sys.stdin.buffer, sink)
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
