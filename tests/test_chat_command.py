"""omnidraft chat: whole conversations through pipes and through a terminal, held against plain decoding."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import NOWHERE
from test_cli import LONG_WORDS, omnidraft

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.options import Options
from omnidraft.runtime.placement import Wishes
from omnidraft.runtime.prompt import Message
from omnidraft.runtime.sampling import Sampling
from omnidraft.tools.answering import Setup
from omnidraft.tools.chat_conversation import Conversation
from omnidraft.tools.chat_session import Asking, Chat
from omnidraft.tools.chat_terminal import Terminal, deferred_interrupt

pytestmark = pytest.mark.model
LENGTH = 24
FAST = ("--target", "qwen3", "--draft", "3", "--max-new-tokens", str(LENGTH))
QUESTIONS = ["How many legs do three cats have?", "And four cats?", "Say that again, in other words."]
GREEDY, WARM = Sampling(), Sampling(0.7, top_p=0.95, seed=5)
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")}


@pytest.fixture(scope="module")
def plain(bundle: Path) -> dict[str, Engine]:
    """Plain decoding of both targets."""
    return {name: Engine.open(bundle, name, options=Options("off")) for name in ("smollm2", "qwen3")}


def chat(bundle: Path, lines: Sequence[str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A conversation through pipes."""
    state = () if "--state" in arguments else ("--no-state",)
    typed = "\n".join([*lines, ""])
    done = omnidraft("chat", bundle, *FAST, *state, *arguments, input=typed, env=ENVIRONMENT)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def said_by(
    engine: Engine, questions: Sequence[str], history: Sequence[Message] = (), sampling: Sampling = GREEDY
) -> list[Message]:
    """The conversation behind `history` as it must be: each answer is the engine's to all before it."""
    messages = list(history)
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = engine.generate(messages, sampling=sampling, max_new_tokens=LENGTH).text
        messages.append({"role": "assistant", "content": text})
    return messages


def answers(messages: Sequence[Message]) -> str:
    """What standard output has of a conversation."""
    return "".join(f"{message['content']}\n" for message in messages if message["role"] == "assistant")


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_every_turn_is_plain_decoding_of_the_same_history(
    bundle: Path, plain: dict[str, Engine], sampling: Sampling
) -> None:
    options = () if sampling is GREEDY else ("--temperature", "0.7", "--top-p", "0.95", "--seed", "5")
    done = chat(bundle, QUESTIONS, *options)
    expected = said_by(plain["qwen3"], QUESTIONS, sampling=sampling)
    assert (done.returncode, done.stdout) == (0, answers(expected))
    alone = [said_by(plain["qwen3"], [question], sampling=sampling) for question in QUESTIONS]
    assert done.stdout != "".join(map(answers, alone)), "the history is read"
    closing = done.stderr.splitlines()
    assert len(closing) == len(QUESTIONS)
    assert all("tokens/s" in line and "acceptance rate" in line and "exact" in line for line in closing)


def test_another_target_goes_on_with_the_same_history(bundle: Path, plain: dict[str, Engine]) -> None:
    done = chat(bundle, [QUESTIONS[0], "/target smollm2", QUESTIONS[1], "/target", "/target qwen3", QUESTIONS[2]])
    expected = said_by(plain["qwen3"], QUESTIONS[:1])
    expected = said_by(plain["smollm2"], QUESTIONS[1:2], expected)
    expected = said_by(plain["qwen3"], QUESTIONS[2:], expected)
    assert done.stdout == answers(expected)
    assert "* smollm2: int8, int4, fp32" in done.stderr and "  qwen3: int8, int4, fp32" in done.stderr


def test_a_target_that_cannot_be_opened_leaves_the_other_one(bundle: Path, plain: dict[str, Engine]) -> None:
    done = chat(bundle, [QUESTIONS[0], "/target nobody", "/target qwen3", QUESTIONS[1]])
    assert done.stdout == answers(said_by(plain["qwen3"], QUESTIONS[:2]))
    assert "no target 'nobody'; it has smollm2, qwen3" in done.stderr and "qwen3 answers already" in done.stderr


def test_the_oldest_exchanges_go_where_the_context_is_full(
    bundle: Path, plain: dict[str, Engine], tmp_path: Path
) -> None:
    engine, system = plain["qwen3"], {"role": "system", "content": "Answer with few words."}
    questions = [f"Remember {number}." + " Cats have legs." * 75 for number in range(5)]
    done = chat(bundle, [*questions, f"/save {tmp_path / 'c.json'}"], "--system", system["content"])
    messages, left_out, dropped = [system], 0, []
    for question in questions:
        asked = {"role": "user", "content": question}
        before = left_out
        while not fits(engine, [system, *messages[1 + 2 * left_out :], asked]):
            left_out += 1
        dropped += [left_out - before] if left_out > before else []
        prompt = [system, *messages[1 + 2 * left_out :], asked]
        text = engine.generate(prompt, sampling=GREEDY, max_new_tokens=LENGTH).text
        messages += [asked, {"role": "assistant", "content": text}]
    assert dropped, "the control: not all of it fits"
    assert done.stdout == answers(messages)
    told = [line for line in done.stderr.splitlines() if "left out" in line]
    assert told == [
        f"omnidraft: the context is full: {n} exchange{'s' if n > 1 else ''} from the beginning left out"
        for n in dropped
    ]
    saved = json.loads((tmp_path / "c.json").read_text())
    assert all(a["prompt_tokens"] + LENGTH <= engine.pair.target.info.context for a in saved["answers"])
    assert saved["messages"] == messages, "what was left out of the prompt is saved too"


def fits(engine: Engine, messages: Sequence[Message]) -> bool:
    try:
        engine.encode(messages, LENGTH)
    except OmniDraftError:
        return False
    return True


def test_a_question_that_does_not_fit_is_one_line_and_moves_nothing(bundle: Path, plain: dict[str, Engine]) -> None:
    done = chat(bundle, [QUESTIONS[0], "word " * 3000, QUESTIONS[1]])
    assert done.stdout == answers(said_by(plain["qwen3"], QUESTIONS[:2]))
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("omnidraft: "))
    assert "has a context of 1024; shorten the prompt" in line


def test_stats_are_sums_over_the_answers(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    done = chat(bundle, [*QUESTIONS, "/stats", f"/save {file}"], "--state", tmp_path / "s")
    reports = json.loads(file.read_text())["answers"]
    lines = done.stderr.splitlines()[len(QUESTIONS) :]
    tokens = sum(report["completion_tokens"] for report in reports)
    assert lines[0].startswith(f"qwen3 (int8): {len(QUESTIONS)} answers, {tokens} tokens · ")
    speed, acceptance, per_verify = map(float, re.findall(r"(\d+\.\d+)", lines[0]))
    for name, figure in (
        ("tokens_per_second", speed), ("acceptance_rate", acceptance), ("tokens_per_verify", per_verify)
    ):  # fmt: skip
        known = [report[name] for report in reports]
        assert min(known) - 0.06 <= figure <= max(known) + 0.06, name
    used = int(re.match(r"context: (\d+) of 1024 tokens", lines[1])[1])  # type: ignore[index]
    assert used >= reports[-1]["prompt_tokens"] + reports[-1]["completion_tokens"]
    assert re.fullmatch(r"n-gram cache: \d+ entries, in .*ngram_cache.json", lines[2])
    assert lines[3] == "the drafter is as shipped; learning is off"
    assert "CPUExecutionProvider" in lines[4] and "drafter on" in lines[4]


def test_stats_before_anything_and_without_drafter(bundle: Path) -> None:
    done = chat(bundle, ["/stats"], "--draft", "off")
    assert done.stdout == "" and "nothing was answered yet" in done.stderr
    assert "context: 0 of 1024 tokens used (0.0%) by 0 exchanges" in done.stderr
    assert "drafting is off" in done.stderr and "no drafter" in done.stderr and "n-gram" not in done.stderr


def test_reset_forgets_and_exit_ends(bundle: Path, plain: dict[str, Engine]) -> None:
    done = chat(bundle, [QUESTIONS[0], "/reset", QUESTIONS[1], "/exit", QUESTIONS[2]])
    first, second = (said_by(plain["qwen3"], [question]) for question in QUESTIONS[:2])
    assert (done.returncode, done.stdout) == (0, answers(first) + answers(second))


def test_help_has_a_line_for_every_command(bundle: Path) -> None:
    lines = chat(bundle, ["/help"]).stderr.splitlines()
    commands = [line.split()[0] for line in lines if line.startswith("/")]
    assert commands == ["/help", "/stats", "/target", "/learn", "/save", "/reset", "/exit"]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("/etc/hosts", "no command /etc/hosts; /help lists them, and a space before the / makes it text"),
        ("/stats now", "/stats takes nothing behind it; leave 'now' out"),
        ("/save", "/save needs a FILE, as in /save conversation.json"),
        ("/learn perhaps", "/learn perhaps: give on or off, or nothing to see which it is"),
        ("/learn on", "learning needs a state folder; begin the chat without --no-state, or with --state DIR"),
    ],
)
def test_a_command_that_cannot_be_is_one_line(bundle: Path, typed: str, line: str) -> None:
    done = chat(bundle, [typed])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"omnidraft: {line}\n")


def test_texts_of_several_lines_and_texts_that_begin_with_a_slash(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    chat(bundle, ['"""What does this do?', "/stats", "  return 1", '"""', "", " /etc is what?", f"/save {file}"])
    asked = [m["content"] for m in json.loads(file.read_text())["messages"] if m["role"] == "user"]
    assert asked == ["What does this do?\n/stats\n  return 1", "/etc is what?"]


def test_bytes_that_are_no_text_are_replaced(bundle: Path) -> None:
    command = [sys.executable, "-m", "omnidraft.tools.cli", "chat", str(bundle), *FAST, "--no-state"]
    done = subprocess.run(command, input=b"caf\xe9 and \xff?\n", capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() and b"Traceback" not in done.stderr


def test_save_holds_the_conversation_and_overwrites_only_its_own_file(
    bundle: Path, plain: dict[str, Engine], tmp_path: Path
) -> None:
    mine, other = tmp_path / "mine one.json", tmp_path / "other.json"
    other.write_text("precious")
    typed = [
        f"/save {other}", QUESTIONS[0], f"/save {mine}", QUESTIONS[1], f"/save {mine}",
        f"/save {tmp_path / 'nowhere' / 'c.json'}", "/reset", f"/save {mine}",
    ]  # fmt: skip
    done = chat(bundle, typed, "--system", "Answer with few words.")
    saved = json.loads(mine.read_text())
    system = {"role": "system", "content": "Answer with few words."}
    assert saved["messages"] == said_by(plain["qwen3"], QUESTIONS[:2], [system])
    assert [answer["target"] for answer in saved["answers"]] == ["qwen3", "qwen3"]
    assert saved["bundle"] == str(bundle)
    assert other.read_text() == "precious" and sorted(tmp_path.iterdir()) == [mine, other]
    refused = [line for line in done.stderr.splitlines() if line.startswith("omnidraft: ")]
    assert [line.split("; ")[0] for line in refused] == [
        f"omnidraft: {other}: there already, and not by this conversation",
        f"omnidraft: {tmp_path / 'nowhere' / 'c.json'}: not saved (No such file or directory)",
        f"omnidraft: {mine}: there already, and not by this conversation",
    ]


def test_learning_changes_no_text(bundle: Path, tmp_path: Path) -> None:
    """Ten answers, so that a round of learning lies between them."""
    questions = [f"Name {number} animals, and what they eat." for number in range(2, 12)]
    without = chat(bundle, questions)
    learning = chat(bundle, [*questions, "/stats"], "--state", tmp_path / "s", "--learn", "on")
    assert learning.stdout == without.stdout
    assert "learned for" in learning.stderr and "learning is on" in learning.stderr
    assert list((tmp_path / "s" / "learning").iterdir()), "what it goes on with next time"
    assert "learned" not in without.stderr


def test_nothing_is_kept_once_learning_is_off(bundle: Path, tmp_path: Path) -> None:
    kept = {}
    for name, command in (("on", "/learn"), ("off", "/learn off")):
        state = tmp_path / name
        done = chat(bundle, [QUESTIONS[0], command, *QUESTIONS[1:]], "--state", state, "--learn", "on")
        assert f"learning is {name}" in done.stderr
        (file,) = (state / "answers").iterdir()
        kept[name] = len(json.loads(file.read_text())["payload"]["answers"])
    assert kept["off"] == 1 < kept["on"], "the same answer twice is kept once"
    chat(bundle, ["/learn on", QUESTIONS[0]], "--state", tmp_path / "begun")
    assert list((tmp_path / "begun" / "answers").iterdir())


def test_a_target_without_a_chat_template_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy", copy_function=os.link))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["targets"]["smollm2"]["chat_template"] = None
    (copy / "manifest.json").unlink()
    (copy / "manifest.json").write_text(json.dumps(manifest))
    line = f"omnidraft: {copy}: target 'smollm2' has no chat template, it only continues text; use: omnidraft run"
    refused = omnidraft("chat", copy, "--no-state", input="hello\n")
    assert refused.returncode == 1 and refused.stderr.startswith(line) and refused.stderr.count("\n") == 1
    done = chat(copy, ["/target smollm2", QUESTIONS[0]])
    assert line in done.stderr and done.stdout.strip(), "the other target goes on"


class Screen:
    """A terminal with the command in it."""

    def __init__(self, *arguments: str | Path, **environment: str) -> None:
        command = [sys.executable, *map(str, arguments)]
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, {**ENVIRONMENT, "TERM": "xterm", **environment})
        self.text = ""

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def until(self, pattern: str, seconds: float = 120.0) -> str:
        """What appears up to a pattern; the rest stays for the next call."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.text, re.DOTALL)) is None:
            assert select.select([self._file], [], [], max(0.0, end - time.monotonic()))[0], self.text
            self.text += os.read(self._file, 65536).decode(errors="replace")
        shown, self.text = self.text[: found.end()], self.text[found.end() :]
        return shown.replace("\r\n", "\n")

    def end(self) -> tuple[int, str]:
        """Exit status, and what was shown before it."""
        while True:
            try:
                data = os.read(self._file, 65536)
            except OSError:  # Linux says so where nobody has the other side open any more
                data = b""
            if not data:
                break
            self.text += data.decode(errors="replace")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.text

    def close(self) -> None:
        os.close(self._file)


@pytest.fixture
def screens(bundle: Path) -> Iterator[Any]:
    """Opens chats in terminals, which are there until the test ends."""
    opened: list[Screen] = []

    def open_screen(*arguments: str | Path, **environment: str) -> Screen:
        opened.append(Screen("-m", "omnidraft.tools.cli", "chat", bundle, *arguments, **environment))
        return opened[-1]

    yield open_screen
    for screen in opened:
        screen.close()


def test_accepted_draft_tokens_have_a_colour(bundle: Path, screens: Any) -> None:
    screen = screens(*FAST, "--no-state")
    assert "green" in screen.until(r"\n.*> ")
    screen.type(QUESTIONS[0] + "\r")
    shown = screen.until(r"tokens per verify").split(QUESTIONS[0])[1]
    screen.until(r"> ")
    screen.type("\x04")
    assert screen.end()[0] == 0
    engine = Engine.open(bundle, "qwen3", options=Options("3"))
    chunks = list(engine.stream([{"role": "user", "content": QUESTIONS[0]}], GREEDY, LENGTH))
    assert {chunk.from_draft for chunk in chunks} == {True, False}
    assert re.findall("\x1b\\[32m(.*?)\x1b\\[0m", shown) == [c.text for c in chunks if c.from_draft]
    assert "".join(chunk.text for chunk in chunks) in re.sub("\x1b\\[[0-9;?]*[a-z]", "", shown)


@pytest.mark.parametrize("how", ["NO_COLOR", "--quiet", "dumb"])
def test_colour_can_be_declined(plain: dict[str, Engine], screens: Any, how: str) -> None:
    environment = {"NO_COLOR": {"NO_COLOR": "1"}, "--quiet": {}, "dumb": {"TERM": "dumb"}}[how]
    screen = screens(*FAST, "--no-state", *(["--quiet"] if how == "--quiet" else []), **environment)
    greeting = screen.until(r"> ")
    screen.type(QUESTIONS[0] + "\r")
    (_, answer) = said_by(plain["qwen3"], QUESTIONS[:1])
    screen.until(re.escape(answer["content"]) + "\r\n")
    closing = screen.until(r"> ")
    screen.type("/exit\r")
    assert screen.end()[0] == 0
    assert ("tokens/s" in closing, "/help" in greeting) == ((False, False) if how == "--quiet" else (True, True))
    assert "green" not in greeting


def test_control_c_stops_the_answer_and_keeps_what_was_said(bundle: Path, screens: Any, tmp_path: Path) -> None:
    file, sampling = tmp_path / "c.json", Sampling(0.7, seed=1)
    warm = ("--temperature", "0.7", "--seed", "1", "--max-new-tokens", "2000", "--draft", "3", "--quiet")
    screen = screens(*warm, "--state", tmp_path / "s")
    screen.until("> ")
    screen.type(LONG_WORDS + "\r")
    screen.until(LONG_WORDS.split()[-1] + r"\r\n.{200}")
    screen.type("\x03")
    screen.until(r"\n(\x1b\[\?2004h)?> ")
    screen.type(f"/save {file}\r")
    screen.until("saved to")
    screen.until("> ")
    screen.type("\x03")
    status, text = screen.end()
    assert status == 130 and "interrupted" in text and "Traceback" not in text
    saved = json.loads(file.read_text())
    question, answer = saved["messages"]
    assert saved["answers"][0]["finish_reason"] == "cancelled"
    engine = Engine.open(bundle, options=Options("off"))
    whole = engine.generate([question], sampling=sampling, max_new_tokens=saved["answers"][0]["completion_tokens"] + 8)
    assert len(answer["content"]) > 100 and whole.text.startswith(answer["content"]) and answer["content"] != whole.text
    (cache,) = (tmp_path / "s").rglob("ngram_cache.json")
    assert json.loads(cache.read_text())["payload"]["entries"], "what was learned is saved"


def test_the_conversation_goes_on_behind_a_stopped_answer(
    bundle: Path, plain: dict[str, Engine], screens: Any, tmp_path: Path
) -> None:
    screen = screens("--target", "qwen3", "--draft", "3", "--max-new-tokens", "600", "--no-state", "--quiet")
    screen.until("> ")
    screen.type("Tell me a very long story about three cats.\r")
    screen.until(r"cats\.\r\n.{80}")
    screen.type("\x03")
    screen.until(r"\n(\x1b\[\?2004h)?> ")
    screen.type(QUESTIONS[1] + "\r")
    screen.until(r"\n(\x1b\[\?2004h)?> ")
    screen.type(f"/save {tmp_path / 'c.json'}\r/exit\r")
    assert screen.end()[0] == 0
    *history, answer = json.loads((tmp_path / "c.json").read_text())["messages"]
    assert [message["role"] for message in history] == ["user", "assistant", "user"]
    assert plain["qwen3"].generate(history, sampling=GREEDY, max_new_tokens=600).text == answer["content"]


def test_a_question_that_is_stopped_before_a_word_is_taken_back(
    bundle: Path, plain: dict[str, Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while the target reads the prompt, in this process, to press it at the right time."""
    setup = Setup(bundle, None, Options("3"), Wishes(), 0, NOWHERE, "auto")
    chat = Chat(setup, "qwen3", False, Conversation(), Asking(GREEDY, 0, LENGTH), Terminal(quiet=True))
    decoder = chat.engine.pair.target.decoder

    def press() -> None:
        while decoder.length == 0:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    decoder.rollback(0)
    thread = threading.Thread(target=press)
    thread.start()
    chat.ask("Cats have legs. " * 150)
    thread.join()
    assert chat.conversation.exchanges == []
    assert capsys.readouterr() == ("\n", "omnidraft: stopped before a word was said: the question is taken back\n")
    chat.ask(QUESTIONS[0])
    assert capsys.readouterr().out == answers(said_by(plain["qwen3"], QUESTIONS[:1]))


def test_pressed_twice_it_is_an_interrupt() -> None:
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupt() as pressed:
        assert not pressed()
        signal.raise_signal(signal.SIGINT)
        assert pressed()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_what_commands_a_terminal_is_not_passed_on() -> None:
    code = (
        "from omnidraft.runtime.generation import Chunk; from omnidraft.tools.chat_terminal import Terminal\n"
        "Terminal(True).show(Chunk('a\\x1b]0;title\\x07b\\n\\tc', 0, False))"
    )
    screen = Screen("-c", code)
    assert screen.end() == (0, "a\ufffd]0;title\ufffdb\r\n\tc")
    screen.close()
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert piped.stdout == b"a\x1b]0;title\x07b\n\tc", "files get what was said"
