"""Learn on the device: the LoRA weights of the drafter and how they are stored."""

import omnidraft.runtime  # noqa: F401  before onnxruntime: it switches telemetry off
