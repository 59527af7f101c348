"""A .gguf file with its matrices in another type, for a comparison at that precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omnidraft.export import cache
from omnidraft.runtime import bundle

PROCEDURE = "matrices in one type/1"


def type_of(path: Path) -> str:
    """What most of its weights are stored as, such as Q4_1."""
    from gguf import GGUFReader

    sizes: dict[str, int] = {}
    for tensor in GGUFReader(path).tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
    return max(sizes, key=lambda name: sizes[name])


def converted(path: Path, kind: str) -> Path:
    """The file with every matrix as `kind` (Q8_0 or F32), the rest and the metadata as they are; made once, cached."""
    key = cache.key_of(file=bundle.sha256(path), kind=kind, procedure=PROCEDURE)
    return cache.find_or_make("gguf", key, lambda folder: _write(path, folder / path.name, kind)) / path.name


def _write(path: Path, out: Path, kind: str) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(path)
    writer = GGUFWriter(out, arch=str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        inner: Any = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(LlamaFileType[{"F32": "ALL_F32", "Q8_0": "MOSTLY_Q8_0"}[kind]])
    wanted = GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = quantize(dequantize(tensor.data, tensor.tensor_type), wanted)
        writer.add_tensor(tensor.name, values, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
