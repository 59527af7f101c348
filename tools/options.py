"""Options that several verbs share, each described once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

BundlePath = Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder made by omnidraft export.")]
Target = Annotated[str | None, typer.Option(help="Which target of the bundle. [default: the first]")]
Precision = Annotated[
    str | None, typer.Option(help="fp32, int8, int4; static: fp32, a16w8, a8w8. [default: the target's first]")
]
Draft = Annotated[
    str, typer.Option(help="cost: as much as pays. threshold[:G]: the paper's rule. 1 to 16: a fixed length. off.")
]
Lossless = Annotated[
    str, typer.Option(help="exact: text equals plain decoding bit for bit. near: one-row passes allowed.")
]
Verification = Annotated[
    str, typer.Option(help="coupled, or paper: the paper's rule, for comparison; biased when sampling.")
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus; 1 is off.")]
TopK = Annotated[int, typer.Option(help="Heaviest tokens to draw from; 0 is off.")]
MinP = Annotated[float, typer.Option(help="Least probability relative to the heaviest token; 0 is off.")]
RepetitionPenalty = Annotated[float, typer.Option(help="1 is off.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the draws. [default: a new one each time]")]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens to emit.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text to stop before; may be given several times.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the prompt as text, without the chat template.")]
Threads = Annotated[int, typer.Option(min=0, max=256, help="Threads of the target; 0: as many as cores, up to 4.")]
Learn = Annotated[str, typer.Option(help="on: learn from the answers, now and then. off: keep none of it.")]
Trainer = Annotated[str, typer.Option(help="auto, onnxruntime-training or onnx-step.")]
Ep = Annotated[
    str,
    typer.Option(
        "--ep",
        help="Execution provider: cpu, qnn, nnapi, xnnpack, openvino, webgpu, coreml, or target=NAME,drafter=NAME. "
        "qnn:SOC says which Snapdragon this is. auto: graphs compiled for this device, else the CPU.",
    ),
]
StrictEp = Annotated[bool, typer.Option("--strict-ep", help="Fail where any node would run on another provider.")]
Profile = Annotated[
    str, typer.Option(help="Graphs to run: cpu, portable or static. auto: those that suit the execution provider.")
]
StateFolder = Annotated[
    Path | None, typer.Option("--state", help="Folder for what is learned. [default: the platform's state folder]")
]
NoState = Annotated[bool, typer.Option("--no-state", help="Read and write no state.")]


def tell(line: str) -> None:
    """One line for somebody who waits at a terminal; a log has no use for it."""
    if sys.stderr.isatty():
        warn(line)


def warn(line: str) -> None:
    """One line on the error stream, apart from the text that a verb prints."""
    print(f"omnidraft: {line}", file=sys.stderr)
