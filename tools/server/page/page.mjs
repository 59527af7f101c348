// The page: a chat with streamed answers, the accepted proposals in colour, and how it goes.

import { chat, learning, models } from "./api.mjs";

const $ = (id) => document.getElementById(id);
const messages = [];
let stopping = new AbortController();

/** The page's phase ("loading", "ready", "running", "failed") and one line about it. */
function say(phase, line) {
  document.body.dataset.phase = phase;
  $("state").textContent = line;
  $("send").disabled = phase !== "ready";
  $("stop").disabled = phase !== "running";
  for (const id of ["target", "learn", "reset"]) $(id).disabled = phase === "running";
}

function fail(error) {
  $("key-field").hidden = $("key-field").hidden && error.status !== 401;
  say(error.status === 401 ? "failed" : "ready", error.message);
}

function key() {
  return $("key").value;
}

function article(role) {
  const made = document.createElement("article");
  made.className = role;
  $("chat").append(made);
  return made;
}

function show(into, text, drafted) {
  const span = document.createElement("span");
  span.textContent = text;
  span.className = drafted ? "drafted" : "";
  into.append(span);
  $("chat").scrollTop = $("chat").scrollHeight;
}

function rate(part, whole) {
  return whole ? (part / whole).toFixed(2) : "–";
}

/** While it streams: what has come so far. */
function live({ accepted, proposed }, pieces, began) {
  const seconds = (performance.now() - began) / 1000;
  const speed = pieces > 1 && seconds > 0 ? ((pieces - 1) / seconds).toFixed(1) : "–";
  return `${speed} tokens/s · acceptance rate ${rate(accepted, proposed)}`;
}

/** The closing line. */
function summary(usage, reason) {
  const { speculative: drafted, completion_tokens: tokens } = usage;
  const parts = [`${tokens} tokens`];
  if (drafted.tokens_per_second !== null) parts.push(`${drafted.tokens_per_second.toFixed(1)} tokens/s`);
  if (drafted.acceptance_rate !== null) parts.push(`acceptance rate ${drafted.acceptance_rate.toFixed(2)}`);
  if (drafted.tokens_per_verify !== null) parts.push(`${drafted.tokens_per_verify.toFixed(2)} tokens per verify`);
  parts.push(`draft ${drafted.draft}`, drafted.lossless, `seed ${drafted.seed}`);
  if (reason === "length") parts.push("cut at most tokens");
  return parts.join(" · ");
}

function request() {
  const made = {
    model: $("target").value,
    messages,
    temperature: Number($("temperature").value),
    max_completion_tokens: Number($("budget").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("seed").value !== "") made.seed = Number($("seed").value);
  return made;
}

/** One turn. What was said so far is kept if it is stopped; a turn that brings nothing is taken back. */
async function answer() {
  const prompt = $("prompt").value;
  messages.push({ role: "user", content: prompt });
  const turn = [article("user"), article("assistant")];
  show(turn[0], prompt, false);
  let [text, pieces, began, reason, usage] = ["", 0, 0, null, null];
  try {
    for await (const chunk of chat(key(), request(), stopping.signal)) {
      usage = chunk.usage ?? usage;
      const [choice] = chunk.choices;
      reason = choice?.finish_reason ?? reason;
      if (!choice?.speculative) continue;
      if (pieces++ === 0) began = performance.now();
      text += choice.delta.content ?? "";
      show(turn[1], choice.delta.content ?? "", choice.speculative.from_draft);
      say("running", live(choice.speculative, pieces, began));
    }
  } catch (error) {
    if (!text) {
      messages.pop();
      turn.forEach((part) => part.remove());
    } else messages.push({ role: "assistant", content: text });
    throw stopping.signal.aborted ? new Error("stopped") : error;
  }
  messages.push({ role: "assistant", content: text });
  $("prompt").value = "";
  Object.assign(turn[1].dataset, { accepted: usage.speculative.accepted, proposed: usage.speculative.proposed });
  return summary(usage, reason);
}

async function send() {
  stopping = new AbortController();
  say("running", "waiting …");
  try {
    say("ready", await answer());
  } catch (error) {
    fail(error);
  }
}

function reset() {
  messages.length = 0;
  $("chat").replaceChildren();
  say("ready", "a new chat");
}

async function switchLearning() {
  const wanted = $("learn").checked;
  say("running", "…");
  try {
    await learning(key(), wanted);
    say("ready", wanted ? "learns from answers, on this device only" : "does not learn from answers");
  } catch (error) {
    $("learn").checked = !wanted;
    fail(error);
  }
}

async function start() {
  say("loading", "starting …");
  try {
    const found = await models(key());
    $("target").replaceChildren(...found.filter((model) => model.chat).map(({ id }) => new Option(id, id)));
    $("learn").checked = await learning(key());
    if ($("target").value) say("ready", "ready");
    else say("failed", "no target of this bundle has a chat template");
  } catch (error) {
    fail(error);
  }
}

$("send").onclick = send;
$("stop").onclick = () => stopping.abort();
$("reset").onclick = reset;
$("learn").onchange = switchLearning;
$("key").onchange = start;
$("prompt").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!$("send").disabled) send();
};
start();
