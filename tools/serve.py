"""omnidraft serve: the OpenAI API over a bundle, and a chat page."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from omnidraft.tools import options as o

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def serve(
    bundle: o.BundlePath,
    host: Annotated[str, typer.Option(help="Address to listen on; any but this machine's own needs a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    target: Annotated[
        list[str] | None,
        typer.Option(help="Target to open at once; the others are opened when asked for. [default: the first]"),
    ] = None,
    precision: o.Precision = None,
    draft: o.Draft = "cost",
    lossless: o.Lossless = "exact",
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of an answer whose request does not say.")
    ] = 1024,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; others are told to come back.")] = 32,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OMNIDRAFT_API_KEY", help="Wanted of every client. [default: OMNIDRAFT_API_KEY, or none]"),
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Web page that may ask, as in https://example.org; may be given often.")
    ] = None,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that a running answer has to end on SIGTERM.")] = 30.0,
    threads: o.Threads = 0,
    ep: o.Ep = "auto",
    strict_ep: o.StrictEp = False,
    profile: o.Profile = "auto",
    state: o.StateFolder = None,
    no_state: o.NoState = False,
    learn: o.Learn = "off",
    trainer: o.Trainer = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", help="Say how each answer went.")] = False,
) -> None:
    """Serve the OpenAI API, and a chat page, on this machine."""
    from omnidraft.runtime.errors import OmniDraftError
    from omnidraft.runtime.options import Options
    from omnidraft.runtime.placement import read_wishes
    from omnidraft.tools.answering import Setup, check_learning, open_state

    for package in ("starlette", "uvicorn", "pydantic", "prometheus_client"):
        if find_spec(package) is None:
            name = package.replace("_", "-")
            raise OmniDraftError(f"serve needs the package {name}; pip install -c constraints.txt '.[serve]'")
    from omnidraft.tools.server.answer import Answers
    from omnidraft.tools.server.app import Access, make_app
    from omnidraft.tools.server.engines import Engines
    from omnidraft.tools.server.listen import bind, is_local, url
    from omnidraft.tools.server.listen import serve as listen
    from omnidraft.tools.server.metrics import Metrics
    from omnidraft.tools.server.worker import Worker

    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise OmniDraftError("--api-key: give printable ASCII characters without spaces around them")
    learning = check_learning(learn, trainer, no_state, draft)
    options, wishes = Options(draft, lossless), read_wishes(ep, strict_ep, profile)
    kept = open_state(state, no_state, learning)
    engines = Engines(Setup(bundle, precision, options, wishes, threads, kept, trainer), learning)
    with bind(host, port) as listening:
        local = is_local(listening.getsockname()[0])
        if not local and api_key is None:
            raise OmniDraftError(f"--host {host}: others can reach it; give --api-key or OMNIDRAFT_API_KEY")
        for name in target or list(engines.targets)[:1]:
            engines.open(name)
        worker = Worker(queue, engines.learn, engines.close)
        access = Access(api_key, {*LOCAL_NAMES, host.strip("[]").lower()} if local else None, allow_origin or ())
        app = make_app(worker, Answers(engines, Metrics(), max_new_tokens, verbose), access)
        print(f"{url(listening)}: {', '.join(engines.targets)}, and a page to chat; Ctrl-C stops", flush=True)
        listen(app, worker, listening, grace)
