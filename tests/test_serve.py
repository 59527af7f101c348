"""omnidraft serve with the real openai client and curl: the engine's text, in OpenAI's shapes."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import NOWHERE, TARGETS
from openai import APIStatusError, OpenAI
from prometheus_client.parser import text_string_to_metric_families
from servers import CHAT, Server, serving

from omnidraft.runtime.engine import Engine
from omnidraft.runtime.options import Options
from omnidraft.runtime.sampling import Sampling

pytestmark = pytest.mark.model
KEY = "a key for tests"
PAGE = "https://example.org"
QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
TURNS: list[Any] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": QUESTION},
]
WARM = {"temperature": 0.8, "top_p": 0.9, "seed": 11}


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    options = ("--target", "qwen3", "--draft", "3", "--max-new-tokens", "40", "--allow-origin", PAGE)
    with serving(bundle, folder, *options, key=KEY) as running:
        yield running
        assert running.complaints == ""


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def plain(bundle: Path) -> Engine:
    """The same target without a drafter."""
    return Engine.open(bundle, "qwen3", options=Options("off"), state=NOWHERE, threads=2)


def ask(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "qwen3", "messages": TURNS, "max_tokens": 32, **more})


def test_each_target_is_a_model(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == list(TARGETS)
    assert client.models.retrieve("qwen3").id == "qwen3"


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({"temperature": 0, "seed": 0}, Sampling()),
        (WARM, Sampling(0.8, top_p=0.9, seed=11)),
        ({"seed": 5}, Sampling(1.0, seed=5)),
        (
            {"seed": 6, "extra_body": {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.3}},
            Sampling(1.0, 20, 1.0, 0.05, 1.3, seed=6),
        ),
    ],
)
def test_the_text_is_that_of_plain_decoding(
    client: OpenAI, plain: Engine, asked: dict[str, Any], sampling: Sampling
) -> None:
    """Whole and streamed; the figures are of the same answer."""
    expected = plain.generate(TURNS, sampling=sampling, max_new_tokens=32)
    whole = ask(client, **asked)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    chunks = list(ask(client, **asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == [
        expected.finish_reason
    ]
    assert chunks[-1].choices == []
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.prompt_tokens == expected.prompt_tokens
        assert usage.completion_tokens == expected.completion_tokens
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        found = usage.speculative
        assert found["seed"] == sampling.seed and (found["draft"], found["lossless"]) == ("3", "exact")
        assert found["acceptance_rate"] == pytest.approx(found["accepted"] / found["proposed"], abs=1e-4)
        assert found["tokens_per_verify"] == pytest.approx(usage.completion_tokens / found["target_passes"], abs=1e-4)
    assert whole.system_fingerprint == chunks[0].system_fingerprint
    assert whole.system_fingerprint == f"omnidraft-{plain.pair.target.info.weights_sha256[:12]}-int8"


def test_chunks_say_what_the_drafter_proposed(client: OpenAI) -> None:
    chunks = list(ask(client, temperature=0, stream=True, stream_options={"include_usage": True}))
    told = [choice.speculative for chunk in chunks for choice in chunk.choices if hasattr(choice, "speculative")]
    total = chunks[-1].usage.speculative
    assert sum(one["from_draft"] for one in told) == total["accepted"] > 0
    assert not all(one["from_draft"] for one in told)
    assert (told[-1]["accepted"], told[-1]["proposed"]) == (total["accepted"], total["proposed"])


def test_another_target_is_opened_when_it_is_asked_for(client: OpenAI, server: Server, bundle: Path) -> None:
    engine = Engine.open(bundle, "smollm2", options=Options("off"), state=NOWHERE, threads=2)
    expected = engine.generate(QUESTION, sampling=Sampling(), max_new_tokens=12).text
    assert not {model["id"]: model["open"] for model in server.ask("/v1/models").json["data"]}["smollm2"]
    found = ask(client, model="smollm2", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=12)
    assert found.choices[0].message.content == expected
    assert all(model["open"] for model in server.ask("/v1/models").json["data"])


def test_completions_go_on_from_the_prompt_as_it_stands(client: OpenAI, plain: Engine) -> None:
    expected = plain.generate("One, two, three,", sampling=Sampling(0.8, seed=2), max_new_tokens=9, raw=True)
    asked: dict[str, Any] = {"model": "qwen3", "prompt": "One, two, three,", "max_tokens": 9}
    whole = client.completions.create(**asked, temperature=0.8, seed=2)
    assert whole.choices[0].text == expected.text
    parts = client.completions.create(**asked, temperature=0.8, seed=2, stream=True)
    assert "".join(part.choices[0].text for part in parts) == expected.text


def test_stop_ends_the_text_before_it(client: OpenAI, plain: Engine) -> None:
    text = plain.generate(TURNS, sampling=Sampling(), max_new_tokens=32).text
    stop = text[8:12]
    for streamed in (False, True):
        found = ask(client, temperature=0, stop=[stop, "never said"], stream=streamed)
        if streamed:
            chunks = list(found)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            said, reason = found.choices[0].message.content, found.choices[0].finish_reason
        assert (said, reason) == (text[: text.index(stop)], "stop")


def test_a_seed_decides_the_text_and_is_told_where_it_was_not_given(client: OpenAI) -> None:
    first = ask(client)
    again = ask(client, seed=first.usage.speculative["seed"])
    assert again.choices[0].message.content == first.choices[0].message.content
    others = {ask(client, seed=seed).choices[0].message.content for seed in range(4)}
    assert len(others) > 1


def test_without_a_limit_the_servers_own_holds(client: OpenAI) -> None:
    found = ask(client, max_tokens=None, seed=1, messages=[{"role": "user", "content": "Tell me a very long story."}])
    assert (found.usage.completion_tokens, found.choices[0].finish_reason) == (40, "length")
    assert ask(client, max_tokens=None, max_completion_tokens=3, seed=1).usage.completion_tokens == 3


def test_logprobs_are_those_of_the_target(client: OpenAI, plain: Engine) -> None:
    chunks = list(plain.stream(TURNS, Sampling(**WARM), 32, top_logprobs=3))
    bytes_of, stops = plain.pair.target.tokens.bytes_of, plain.pair.target.info.stop_ids
    expected = [(bytes_of[c.token], c.logprobs) for c in chunks if c.token not in stops]
    found = ask(client, **WARM, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    streamed = ask(client, **WARM, logprobs=True, top_logprobs=3, stream=True)
    parts = [part for chunk in streamed if chunk.choices[0].logprobs for part in chunk.choices[0].logprobs.content]
    for tokens in (found, parts):
        assert len(tokens) == len(expected)
        for token, (spelled, likely) in zip(tokens, expected, strict=True):
            assert bytes(token.bytes) == spelled and token.logprob == likely.logprob
            assert [(bytes(t.bytes), t.logprob) for t in token.top_logprobs] == [
                (bytes_of[i] or b"", value) for i, value in likely.top
            ]
    assert 0 < sum(math.exp(t.logprob) for t in found[0].top_logprobs) <= 1
    old = client.completions.create(model="qwen3", prompt="One, two,", max_tokens=5, logprobs=2, temperature=0)
    told = old.choices[0].logprobs
    assert "".join(told.tokens) == old.choices[0].text
    assert [old.choices[0].text[i:].startswith(t) for i, t in zip(told.text_offset, told.tokens, strict=True)]
    assert all(tops[token] == max(tops.values()) for token, tops in zip(told.tokens, told.top_logprobs, strict=True))
    assert told.token_logprobs == [tops[token] for token, tops in zip(told.tokens, told.top_logprobs, strict=True)]


def test_messages_may_come_as_openai_writes_them(client: OpenAI) -> None:
    """In parts, from a developer, with fields that are null, with habits that ask for nothing."""
    expected = ask(client, temperature=0).choices[0].message.content
    messages = [
        {"role": "developer", "content": "You are brief."},
        {"role": "user", "content": [{"type": "text", "text": "Name a "}, {"type": "text", "text": "colour."}]},
        {"role": "assistant", "content": "Blue.", "refusal": None, "tool_calls": None},
        TURNS[-1],
    ]
    habits = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": None, "tools": []}
    found = ask(client, temperature=0, messages=messages, response_format={"type": "text"}, **habits)
    assert found.choices[0].message.content == expected


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"n": 2}, 400, "n: not supported"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools: not supported"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format: not supported"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty: not supported"),
    ({"audio": {"voice": "x"}}, 400, "audio: not supported"),
    ({"user": "me"}, 400, "user: not supported"),
    ({"messages": []}, 400, "messages: "),
    ({"messages": "hello"}, 400, "messages: "),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role: "),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "text only"),
    ({"messages": [{"role": "user", "content": "  "}]}, 400, "prompt is empty"),
    ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, 400, "messages.0.name: not supported"),
    ({"max_tokens": 0}, 400, "max_tokens: "),
    ({"max_tokens": 10**6}, 400, "context of"),
    ({"messages": [{"role": "user", "content": "word " * 20_000}]}, 400, "context of"),
    ({"max_completion_tokens": 4}, 400, "give one of them"),
    ({"temperature": -1}, 400, "temperature must be"),
    ({"temperature": "hot"}, 400, "temperature: "),
    ({"top_p": 0}, 400, "top-p must be"),
    ({"seed": -1}, 400, "seed must be"),
    ({"stop": ""}, 400, "stop.0: "),
    ({"stop": ["x"] * 17}, 400, "stop: "),
    ({"top_logprobs": 2}, 400, "top_logprobs: only with logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs: "),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options: only with stream"),
    ({"model": "gpt"}, 404, "it has smollm2, qwen3"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("change", "status", "says"), BAD, ids=[f"{s}-{next(iter(c))}" for c, s, _ in BAD])
def test_what_cannot_be_answered_is_refused_by_name(
    server: Server, change: dict[str, Any], status: int, says: str, streamed: bool
) -> None:
    if streamed and "stream_options" in change:
        return
    reply = server.ask(CHAT, {"model": "qwen3", "messages": TURNS, "max_tokens": 4, "stream": streamed, **change})
    assert reply.status == status, reply.text
    assert says in reply.error["message"]
    assert set(reply.error) == {"message", "type", "param", "code"}


def test_the_client_raises_what_the_server_says(client: OpenAI) -> None:
    with pytest.raises(APIStatusError, match="n: not supported") as raised:
        ask(client, n=3)
    assert (raised.value.status_code, raised.value.type, raised.value.param) == (400, "invalid_request_error", "n")


def test_what_is_not_a_request_is_refused(server: Server) -> None:
    def status(path: str, data: Any = None, method: str | None = None, **headers: str | None) -> int:
        reply = server.ask(path, data, method, **headers)
        assert reply.error["message"]
        return reply.status

    assert status(CHAT, b"{") == status(CHAT, b"[]") == status(CHAT, b"") == status(CHAT, b"\xff") == 400
    assert status(CHAT, b"[" * 100_000) == 400
    assert status(CHAT, b" " * (2 << 20)) == 413
    assert status(CHAT, b"{}", Content_Type="text/plain") == 415
    assert status("/v1/embeddings", {}) == status("/v1/embeddings") == status("/v1/models/gpt") == 404
    assert status("/page/nothing.js") == status("/page/../app.py") == 404
    assert status(CHAT) == status("/v1/models", method="DELETE") == 405
    assert status("/v1/completions", {"model": "qwen3", "prompt": ["a", "b"]}) == 400
    assert status("/v1/completions", {"model": "qwen3", "prompt": [1, 2]}) == 400
    assert status("/v1/completions", {"model": "qwen3", "prompt": "a", "echo": True}) == 400
    assert status("/learning", {"on": "yes"}, "PUT") == 400


def test_only_those_who_may_come_in(server: Server) -> None:
    """The key, the server's name (DNS rebinding), and pages from elsewhere."""
    for wrong in (None, "Bearer ", "Bearer another", f"Basic {KEY}", "Bearer \xff"):
        reply = server.ask("/v1/models", Authorization=wrong)
        assert reply.status == 401 and reply.error["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"
    assert server.ask("/metrics", Authorization=None).status == server.ask(CHAT, {}, Authorization=None).status == 401
    assert server.ask("/health", Authorization=None).status == server.ask("/", Authorization=None).status == 200
    assert server.ask("/v1/models", Host="attacker.example").status == 403
    assert server.ask("/v1/models", Host="[").status == 403
    assert server.ask("/v1/models", Host="LOCALHOST:1").status == 200
    assert server.ask("/v1/models", Origin="https://attacker.example").status == 403
    assert server.ask("/v1/models", Origin="null").status == 403
    own = server.ask("/v1/models", Origin=server.url)
    assert own.status == 200 and "access-control-allow-origin" not in own.headers
    let = server.ask("/v1/models", Origin=PAGE)
    assert let.status == 200 and let.headers["access-control-allow-origin"] == PAGE


def test_curl_reads_a_stream(server: Server) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"model": "qwen3", "messages": TURNS, "max_tokens": 6, "temperature": 0, "stream": True})
    headers = ("-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}")
    command = ["curl", "-sS", "--no-buffer", "-D", "-", *headers, "-d", body, server.url + CHAT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    head, _, rest = done.stdout.replace("\r\n", "\n").partition("\n\n")
    assert "200 OK" in head and "text/event-stream" in head
    *events, last, end = rest.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events)


def test_metrics_count_what_was_answered(server: Server, client: OpenAI) -> None:
    def totals() -> dict[str, float]:
        found = text_string_to_metric_families(server.ask("/metrics").text)
        samples = [s for family in found for s in family.samples if s.labels.get("model", "qwen3") == "qwen3"]
        return {s.name: s.value for s in samples if "le" not in s.labels and "path" not in s.labels}

    before = totals()
    usages = [ask(client, seed=seed).usage for seed in range(3)]
    after = totals()

    def grown(name: str) -> float:
        return after[f"omnidraft_{name}"] - before[f"omnidraft_{name}"]

    assert grown("prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages)
    assert grown("completion_tokens_total") == sum(usage.completion_tokens for usage in usages)
    for name in ("proposed", "accepted"):
        assert grown(f"{name}_tokens_total") == sum(usage.speculative[name] for usage in usages)
    assert grown("target_passes_total") == sum(usage.speculative["target_passes"] for usage in usages)
    assert grown("queue_seconds_count") == grown("time_to_first_token_seconds_count") == 3
    assert after["omnidraft_queue_length"] == after["omnidraft_running"] == 0
    assert after["process_resident_memory_bytes"] > 0
