"""The program that exports with optimum-onnx: `PYTHON -I optimum_worker.py PACKAGES [CHECKPOINT OUT]`.

optimum-onnx needs an older transformers than everything else here. It lies in PACKAGES, with what belongs to it, and is
seen by this process alone; torch and onnx are those of the interpreter.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(packages: str, checkpoint: str = "", out: str = "") -> None:
    """Write `out`/model.onnx of the Hugging Face folder `checkpoint`, at fp32; without one, import what that takes.

    Raises what optimum-onnx and transformers raise.
    """
    sys.path.insert(0, packages)
    import torch
    from optimum.exporters.onnx import onnx_export_from_model
    from transformers import AutoModelForCausalLM

    if not checkpoint:
        return
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True).eval()
    # Its own validation compares some logits; the parity gate compares more.
    onnx_export_from_model(model, Path(out), task="text-generation-with-past", do_validation=False, preprocessors=[])


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:  # of any type, with advice on several lines
        sys.exit((str(error).strip().splitlines() or [type(error).__name__])[0])
