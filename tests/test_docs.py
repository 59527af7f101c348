"""The documents say what is: commands that parse, links that lead somewhere, every dependency explained."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from omnidraft.tools.cli import GROUPS, VERBS
from omnidraft.tools.cli_reference import reference

ROOT = Path(__file__).parent.parent
DOCUMENTS = [p for p in sorted(ROOT.rglob("*.md")) if not {"node_modules", ".venv", "bundles"} & set(p.parts)]


def test_command_reference_is_current() -> None:
    assert (ROOT / "docs/cli.md").read_text(encoding="utf-8") == reference(), (
        "run: python -m omnidraft.tools.cli_reference > docs/cli.md"
    )


def shown_commands() -> list[str]:
    """Every `omnidraft …` line in a code block of a document."""
    lines = []
    for document in DOCUMENTS:
        for block in re.findall(r"```(?:sh|console)?\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
            joined = block.replace("\\\n", " ")
            lines += [
                line.removeprefix("$ ").strip() for line in joined.splitlines() if re.match(r"(\$ )?omnidraft ", line)
            ]
    return lines


def test_commands_are_shown() -> None:
    assert len(shown_commands()) >= 4


@pytest.mark.parametrize("command", shown_commands())
def test_shown_commands_exist_with_their_options(command: str) -> None:
    _, verb, *arguments = shlex.split(command, comments=True)
    names = {v.__name__.replace("_", "-") for v in VERBS} | set(GROUPS)
    assert verb in names
    help_text = reference().split(f"## {verb}\n")[1].split("\n## ")[0]
    for argument in arguments:
        if argument.startswith("--"):
            assert re.search(rf"{re.escape(argument)}\b", help_text), f"{verb} has no {argument}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        assert (document.parent / link).exists(), link


def test_every_dependency_has_a_line_in_the_readme() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").lower()
    for requirement in wanted:
        name = re.split(r"[<>=\[]", requirement)[0]
        assert f"`{name}`" in readme, f"{name} is not explained"


def test_every_module_says_what_it_is_for() -> None:
    for room in ("export", "runtime", "adapters", "models", "tools"):
        for path in (ROOT / room).rglob("*.py"):
            assert path.read_text(encoding="utf-8").startswith('"""'), path


def test_the_python_reference_has_a_page_for_every_module(tmp_path: Path) -> None:
    """Made with the command of docs/laptop.md."""
    rooms = ("runtime", "adapters")
    command = [sys.executable, "-m", "pdoc", "-o", str(tmp_path), *(f"omnidraft.{room}" for room in rooms)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Warn" not in done.stderr, done.stderr
    for room in rooms:
        modules = {path.stem for path in (ROOT / room).glob("*.py")} - {"__init__"}
        pages = {path.stem for path in (tmp_path / "omnidraft" / room).glob("*.html")}
        assert modules == pages
