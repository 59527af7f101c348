"""What else a stranger's file can hold: it is refused in one line, which cannot harm either."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import small_tokenizer
from test_hostile_bundles import SEEDS, describe, graph, refused, write_bundle
from typer.testing import CliRunner

from omnidraft.adapters.learning_file import LearningFile
from omnidraft.runtime.calibration import usable
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.state import State
from omnidraft.runtime.token_bytes import TokenBytes
from omnidraft.tools.cli import app
from omnidraft.tools.measure import read_prompts
from omnidraft.tools.session import SessionFile
from omnidraft.tools.training import rows

ROOT = Path(__file__).parent.parent
KEY = {"drafter": "d" * 64, "target": "t" * 64}


def state_document(schema: str, key: dict[str, Any], payload: Any) -> bytes:
    """A document with the right checksum, whatever is in it."""
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    checksum = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"schema": schema, "key": key, "checksum": checksum, "payload": payload}).encode()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


class TestTokenizers:
    def edited(self, change: Callable[[dict[str, Any]], object]) -> bytes:
        document = json.loads(small_tokenizer().to_str())
        change(document)
        return json.dumps(document).encode()

    @pytest.mark.parametrize(
        "change",
        [
            lambda d: d["model"].update(unk_token={}),
            lambda d: d["model"]["vocab"].update({"\ud800": 900}),
            lambda d: d["added_tokens"][0].update(content="\udfff"),
            lambda d: d["model"]["vocab"].update(x=2**31),
            lambda d: d["model"].update(vocab=[]),
        ],
    )
    def test_malformed_parts_are_one_line(self, change: Callable[[dict[str, Any]], object]) -> None:
        with refused(r"\Ax/tokenizer.json: [^\n]+\Z"):
            TokenBytes(self.edited(change), "x/tokenizer.json")

    @pytest.mark.parametrize("change", [lambda d: d["added_tokens"][0].update(id=0), lambda d: None])
    def test_an_id_beyond_the_model_spells_nothing(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Found by fuzzing: a token with one id in the vocabulary and another among the added ones."""
        document = json.loads((SEEDS / "tokenizer" / "sentencepiece.json").read_text())
        document["model"]["vocab"]["<unk>"] = 256
        change(document)
        tokens = TokenBytes(json.dumps(document).encode(), "x")
        tokens.fit(20)
        assert tokens.spells(tokens.encode(b"the ca"), b"the ca")
        with refused("has no tokens for the bytes"):
            tokens.encode("漢".encode())

    def test_nested_steps_are_gone_through_without_recursion(self) -> None:
        def nest(document: dict[str, Any]) -> None:
            for _ in range(300):
                document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [document["pre_tokenizer"]]}

        with refused("the tokenizers package cannot load it"):  # it allows 128
            TokenBytes(self.edited(nest), "x")

    def test_a_pre_tokenizer_that_doubles_the_text_again_and_again_is_refused(self) -> None:
        """Found by fuzzing: byte-level characters of byte-level characters, 27 times over."""
        end = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        digits = {"type": "Digits", "individual_digits": True}
        for steps in ([digits, end] * 27, [digits] * 17 + [end]):
            with refused("x: its pre-tokenizer repeats itself"):
                sequence = {"type": "Sequence", "pretokenizers": steps}
                TokenBytes(self.edited(lambda d, steps=sequence: d.update(pre_tokenizer=steps)), "x")

    def test_a_regular_expression_that_explodes_is_one_line(self) -> None:
        """Its library stops after ten million steps, with a panic that is no Exception."""
        split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
        end = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        steps = {"type": "Sequence", "pretokenizers": [split, end]}
        tokens = TokenBytes(self.edited(lambda d: d.update(pre_tokenizer=steps)), "x")
        assert tokens.spells(tokens.encode(b"aaa!"), b"aaa!")
        with refused("cannot tokenize this text"):
            tokens.encode(b"a" * 40 + b"!")


class TestState:
    def test_pass_times_that_do_not_fit_together_are_measured_again(self) -> None:
        good = {"pasts": [64, 448], "widths": [1, 2], "seconds": [[0.1, 0.2], [0.2, 0.3]]}
        said: list[str] = []
        assert usable({"w0": 2, "passes": good}, 2, said.append) == {"w0": 2, "passes": good} and not said
        for change in ({"widths": [1]}, {"pasts": [448, 64]}, {"seconds": [[0.1]] * 2}, {"widths": [2, 2]}):
            assert usable({"w0": 2, "passes": {**good, **change}}, 2, said.append) == {"w0": 2}
        assert usable({"passes": good}, 17, said.append) == {}
        assert usable({"w0": 60}, 2, said.append) == {}
        assert len(said) == 5

    def test_whole_numbers_written_as_5_0_are_whole_numbers(self, tmp_path: Path) -> None:
        """The schema takes them for integers; a generator of random numbers does not."""
        state = State(tmp_path, pytest.fail)
        learning = LearningFile(state, "learning", {}, 64, 48)
        replay = json.loads((SEEDS / "replay" / "replay.json").read_text())
        replay["anchors"] *= 24
        small = json.loads((SEEDS / "learning" / "new.json").read_text())
        small |= {"set_apart": 31.0, "responses": 7.0, "behind": 1.0}
        state.update("learning/replay.json", "omnidraft-replay/1", {}, lambda old: replay)
        state.update("learning/learning.json", "omnidraft-learning/1", {}, lambda old: small)
        memory, standing = learning.load()
        memory.add(memory.anchors[:1])
        assert (memory.responses, memory.set_apart, standing.behind) == (8, 32, 1)

    def test_counts_are_numbers_that_can_be_divided(self, tmp_path: Path) -> None:
        """Found by fuzzing: a whole number over the largest float."""
        said: list[str] = []
        state, key = State(tmp_path, said.append), {**KEY, "prompts": "p" * 64}
        payload = {"done": 1, "responses": [["a", 10**400, 1, 0.5, 1]], "rounds": []}
        (tmp_path / "learning").mkdir()
        path = tmp_path / "learning" / f"session-{'p' * 12}.json"
        path.write_bytes(state_document("omnidraft-session/1", key, payload))
        assert SessionFile(state, "learning", KEY, "p" * 64).load().acceptance(20) is None
        assert len(said) == 1 and "damaged" in said[0]


class TestOutput:
    def test_errors_cannot_steer_the_terminal(self) -> None:
        error = OmniDraftError("a\x1b]0;owned\x07\nb\u202ec\udcff é😀")
        assert str(error) == "a ]0;owned  b c  é😀" and str(error).isprintable()

    @pytest.mark.parametrize("key", ["license", "architecture"])
    def test_what_show_prints_is_printable(self, bundle: Path, key: str) -> None:
        describe(bundle, lambda m: m["drafter"].update({key: "\x1b[2J"}))
        result = CliRunner().invoke(app, ["show", str(bundle)])
        assert result.exit_code == 1 and result.stderr.count("\n") == 1
        assert "\x1b" not in result.output and "not a manifest" in result.stderr

    def test_show_and_doctor_load_no_model(self, bundle: Path, tmp_path: Path) -> None:
        """These graphs run nowhere: they lack what every decoder needs."""
        shown = CliRunner().invoke(app, ["show", str(bundle), "--check"])
        assert shown.exit_code == 0 and "all 5 files" in shown.stdout
        looked = CliRunner().invoke(app, ["doctor", str(bundle), "--state", str(tmp_path / "state")])
        assert "all 5 files intact" in looked.stdout

    def test_doctor_names_a_graph_that_reads_elsewhere(self, bundle: Path, tmp_path: Path) -> None:
        (bundle / "d" / "model.onnx").write_bytes(graph("../t/vocabulary.json"))
        describe(bundle)
        looked = CliRunner().invoke(app, ["doctor", str(bundle), "--state", str(tmp_path / "state")])
        assert looked.exit_code == 1 and "which is no file of the bundle beside it" in looked.stdout


class TestPrompts:
    @pytest.mark.parametrize("row", [{"prompt": "\ud800"}, {"prompt": "a", "task": "\udcff"}, {"prompt": 1}, [], 1])
    def test_rows_that_are_no_text_are_named(self, tmp_path: Path, row: Any) -> None:
        (tmp_path / "p.jsonl").write_text(json.dumps(row))
        with refused(r"p.jsonl:1: not a JSON object"):
            read_prompts(tmp_path / "p.jsonl")

    @pytest.mark.parametrize("temperature", ["1" + "0" * 400, '"nan"', '"inf"', "[]", "1e999", "NaN", "null"])
    def test_answers_with_no_temperature_of_this_world_are_skipped(self, tmp_path: Path, temperature: str) -> None:
        lines = [f'{{"prompt": "a", "response": "b", "temperature": {t}}}' for t in ("0", temperature)]
        (tmp_path / "r.jsonl").write_text("\n".join(lines))
        found, complaints = rows.read_rows([tmp_path / "r.jsonl"])
        assert len(found) == 1 and len(complaints) == 1


def test_nothing_of_a_bundle_is_run_but_graphs_and_templates() -> None:
    """No unpickling, and no code made from data, in what reaches a device."""
    users = set()
    for path in [*(ROOT / "runtime").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not {"pickle", "marshal", "shelve", "dill", "joblib"} & set(modules), path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "__import__"), path
                if called in ("np.load", "numpy.load"):
                    users.add(path.name)
                    assert "allow_pickle=False" in ast.unparse(node), path
    assert users, "the check is vacuous"


def test_security_md_names_tests_that_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    tests = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").glob("test_*.py")))
    names = re.findall(r"`((?:test_|Test)\w+)`", text)
    assert len(names) > 5 and all(re.search(rf"(def|class) {name}\b", tests) for name in names)
