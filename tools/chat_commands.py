"""The commands of a chat: what they are called, what they take, what they do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omnidraft.runtime.errors import OmniDraftError
from omnidraft.runtime.files import write_whole
from omnidraft.tools.chat_conversation import counted
from omnidraft.tools.chat_session import Chat
from omnidraft.tools.report_lines import where


@dataclass(frozen=True)
class Command:
    """`takes`: what may stand behind it, "" for nothing; `does`: gets the chat and that, and returns lines to show."""

    takes: str
    help: str
    does: Callable[[Chat, str], list[str]]


def obey(chat: Chat, line: str) -> list[str]:
    """Run a command; the lines that answer it. Raises OmniDraftError if there is none like it, or it cannot be done."""
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise OmniDraftError(f"no command {name}; /help lists them, and a space before the / makes it text")
    argument = argument.strip()
    if argument and not command.takes:
        raise OmniDraftError(f"{name} takes nothing behind it; leave {argument!r} out")
    return command.does(chat, argument)


def _help(chat: Chat, argument: str) -> list[str]:
    width = max(len(f"{name} {command.takes}") for name, command in COMMANDS.items()) + 2
    lines = [f"{name} {command.takes}".ljust(width) + command.help for name, command in COMMANDS.items()]
    return [
        *lines,
        '"""'.ljust(width) + 'begins a text of several lines, which ends with """',
        "Ctrl-C".ljust(width) + "stops an answer and keeps what was said; at the prompt it ends the chat",
    ]


def _stats(chat: Chat, argument: str) -> list[str]:
    engine, conversation = chat.engine, chat.conversation
    pair, used, context = engine.pair, conversation.tokens(engine), engine.pair.target.info.context
    lines = conversation.figures() or ["nothing was answered yet"]
    left_out = f"; the oldest {conversation.left_out} left out" if conversation.left_out else ""
    said = counted(len(conversation.exchanges), "exchange")
    lines.append(f"context: {used} of {context} tokens used ({used / context:.1%}) by {said}{left_out}")
    if engine.cache is not None:
        place = "kept nowhere" if engine.cache_path is None else f"in {engine.cache_path}"
        lines.append(f"n-gram cache: {len(engine.cache)} entries, {place}")
    return [*lines, _adapter(chat), where(pair.name, pair.precision, pair.placement)]


def _adapter(chat: Chat) -> str:
    if chat.engine.pair.drafter is None:
        return "drafting is off"
    version = chat.answerer.version
    adapter = f"adapter version {version}" if version else "the drafter is as shipped"
    return f"{adapter}; learning is {'off' if chat.answerer.learner is None else 'on'}"


def _target(chat: Chat, name: str) -> list[str]:
    pair = chat.engine.pair
    if not name:
        return [
            f"{'*' if known == pair.name else ' '} {known}: "
            f"{', '.join(dict.fromkeys(graph.precision for graph in info.graphs))}, "
            f"context of {info.context} tokens"
            for known, info in pair.bundle.targets.items()
        ]
    if name == pair.name:
        return [f"{name} answers already"]
    chat.use_target(name)
    pair = chat.engine.pair
    return [f"{pair.name} ({pair.precision}) answers from here on, and reads what was said"]


def _learn(chat: Chat, wanted: str) -> list[str]:
    if wanted not in ("", "on", "off"):
        raise OmniDraftError(f"/learn {wanted}: give on or off, or nothing to see which it is")
    if wanted and (wanted == "on") != (chat.answerer.learner is not None):
        if wanted == "on" and chat.setup.state.folder is None:
            raise OmniDraftError(
                "learning needs a state folder; begin the chat without --no-state, or with --state DIR"
            )
        chat.answerer.set_learning(wanted == "on")
    return [_adapter(chat)]


def _save(chat: Chat, file: str) -> list[str]:
    if not file:
        raise OmniDraftError("/save needs a FILE, as in /save conversation.json")
    conversation = chat.conversation
    text = json.dumps(conversation.document(str(chat.setup.bundle)), ensure_ascii=False, indent=1)
    try:
        path = Path(file).expanduser()
        if path.exists() and path != conversation.file:
            raise OmniDraftError(f"{path}: there already, and not by this conversation; give another FILE")
        write_whole(path, f"{text}\n".encode("utf-8", "replace"))
    except (OSError, ValueError, RuntimeError) as error:  # a name can be wrong in all these ways
        raise OmniDraftError(f"{file}: not saved ({getattr(error, 'strerror', error)}); give another FILE") from None
    conversation.file = path
    return [f"{counted(len(conversation.exchanges), 'exchange')} saved to {path}"]


def _reset(chat: Chat, argument: str) -> list[str]:
    chat.reset()
    return ["forgotten; the conversation begins anew"]


def _exit(chat: Chat, argument: str) -> list[str]:
    chat.ended = True
    return []


COMMANDS = {
    "/help": Command("", "this list", _help),
    "/stats": Command("", "the figures of this conversation, and what runs where", _stats),
    "/target": Command("[NAME]", "the bundle's targets, or let another one answer", _target),
    "/learn": Command("[on|off]", "whether the drafter learns from the answers, or begin and end it", _learn),
    "/save": Command("FILE", "the conversation as JSON", _save),
    "/reset": Command("", "forget the conversation and begin anew", _reset),
    "/exit": Command("", "end the chat; so does the end of input (Ctrl-D)", _exit),
}
