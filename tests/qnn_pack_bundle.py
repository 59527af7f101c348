"""Run in a process of its own, where onnxruntime-qnn can be imported: exports a bundle that pack is tested with."""

from __future__ import annotations

import sys
from pathlib import Path

import onnxruntime as ort
from checkpoints import write_checkpoint
from qnn_bundle_facts import make

from omnidraft.export import cache


def main(folder: Path) -> None:
    ort.set_default_logger_severity(4)
    cache.cache_root = lambda: folder / "cache"
    model = str(write_checkpoint(folder / "model"))
    make(model, model, folder / "bundle", "cpu,static,qnn:SM8550,X-Elite,simulator", "fp32")
    make(model, model, folder / "compiled", "qnn:SM8550", "fp32")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
