"""omnidraft chat: a conversation in the terminal, answer by answer."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from omnidraft.tools import options as o

if TYPE_CHECKING:
    from omnidraft.tools.chat_session import Chat


def chat(
    bundle: o.BundlePath,
    target: o.Target = None,
    precision: o.Precision = None,
    system: Annotated[str | None, typer.Option(help="System message. [default: the template's own, if any]")] = None,
    draft: o.Draft = "cost",
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    seed: o.Seed = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    lossless: o.Lossless = "exact",
    threads: o.Threads = 0,
    ep: o.Ep = "auto",
    strict_ep: o.StrictEp = False,
    profile: o.Profile = "auto",
    state: o.StateFolder = None,
    no_state: o.NoState = False,
    learn: o.Learn = "off",
    trainer: o.Trainer = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", help="Answers without colour and closing line.")] = False,
) -> None:
    """Talk with a target; /help lists what can be typed beside questions.

    Answers go to standard output, everything else to standard error. Works with pipes too: one question a line.
    """
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.placement import read_wishes
    from omnidraft.runtime.sampling import Sampling
    from omnidraft.tools.answering import Setup, check_learning, open_state
    from omnidraft.tools.chat_conversation import Conversation
    from omnidraft.tools.chat_session import Asking, Chat
    from omnidraft.tools.chat_terminal import Terminal

    learning = check_learning(learn, trainer, no_state, draft)
    asking = Asking(Sampling(temperature, top_k, top_p, min_p, repetition_penalty), seed, max_new_tokens)
    options, wishes = Options(draft, lossless), read_wishes(ep, strict_ep, profile)
    kept = open_state(state, no_state, learning)
    setup = Setup(bundle, precision, options, wishes, threads, kept, trainer)
    with closing(Chat(setup, target, learning, Conversation(system), asking, Terminal(quiet))) as opened:
        _talk(opened)


def _talk(chat: Chat) -> None:
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.tools.chat_commands import obey

    chat.greet()
    for text, literal in chat.terminal.typed():
        if not literal and text.startswith("/"):
            try:
                for line in obey(chat, text):
                    chat.terminal.say(line)
            except OmniDraftError as error:
                o.warn(str(error))
        elif text.strip():
            chat.ask(text.strip())
        if chat.ended:
            return
