"""Open a bundle, draft, translate, verify and stream text. Needs no torch."""

import os

# ONNX Runtime reports its use to its makers unless told not to before it is imported. Nothing leaves a device here.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
