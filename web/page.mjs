// The page: a prompt, a streamed answer with the accepted proposals in colour, and how it went.

import { Bundle, checksHashes } from "./bundle.mjs";
import { Generation } from "./generation.mjs";
import { LONGEST_DRAFT } from "./invariance.mjs";
import { loadPair } from "./pair.mjs";
import { encodePrompt } from "./prompt.mjs";
import { sampling } from "./sampling.mjs";

const $ = (id) => document.getElementById(id);
const MOST_THREADS = 4;

/** The page's phase ("loading", "ready", "running", "failed") and one line about it. */
function say(phase, line) {
  document.body.dataset.phase = phase;
  $("state").textContent = line;
  $("run").disabled = phase !== "ready";
  $("stop").disabled = phase !== "running";
}

function settings() {
  return {
    sampling: sampling({
      temperature: Number($("temperature").value),
      top_k: Number($("top-k").value),
      top_p: Number($("top-p").value),
      seed: BigInt($("seed").value || 0),
    }),
    draftLength: Number($("draft").value),
    budget: Number($("budget").value),
  };
}

function show(chunks) {
  for (const { text, token, drafted } of chunks) {
    const span = document.createElement("span");
    span.textContent = text;
    span.dataset.token = token;
    span.className = drafted ? "drafted" : "";
    $("answer").append(span);
  }
}

/** The closing line: tokens, speed, acceptance, and which promise held. */
function summary(generation, exact) {
  const { counts, seconds, firstTokenAt, emitted, finishReason } = generation;
  const parts = [`${emitted.length} tokens`];
  if (emitted.length > 1) parts.push(`${((emitted.length - 1) / (seconds - firstTokenAt)).toFixed(1)} tokens/s`);
  if (counts.proposed) {
    parts.push(`acceptance rate ${(counts.accepted / counts.proposed).toFixed(2)}`);
    parts.push(`${(emitted.length / counts.passes).toFixed(2)} tokens per verify`);
  }
  parts.push(exact ? "exact" : "near (text may differ from plain decoding)");
  if (finishReason === null) parts.push("stopped");
  return parts.join(" · ");
}

async function answer(pair, stopped) {
  $("answer").replaceChildren();
  const { sampling: how, draftLength, budget } = settings();
  const generation = new Generation(pair, encodePrompt(pair, $("prompt").value, budget), how, draftLength, budget);
  for await (const chunks of generation.rounds()) {
    show(chunks);
    if (stopped()) break;
    await new Promise((resolve) => setTimeout(resolve)); // let the browser draw
  }
  Object.assign($("answer").dataset, generation.counts);
  return summary(generation, pair.exact);
}

/** ONNX Runtime Web, and the class of tokenizers. */
async function modules() {
  try {
    const ort = await import("./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs");
    const { Tokenizer } = await import("./node_modules/@huggingface/tokenizers/dist/tokenizers.min.mjs");
    return [ort, Tokenizer];
  } catch (error) {
    throw new Error(`node_modules is missing or not complete: run the npm line of README.md (${error.message})`);
  }
}

async function main() {
  for (let k = 1; k <= LONGEST_DRAFT; k++) $("draft").add(new Option(String(k), String(k), k === 3, k === 3));
  const [ort, Tokenizer] = await modules();
  // More than one thread needs a page that is isolated from others: see README.md.
  ort.env.wasm.numThreads = crossOriginIsolated ? Math.min(MOST_THREADS, navigator.hardwareConcurrency) : 1;
  const bundle = await Bundle.open("./bundle/");
  const pair = await loadPair(ort, Tokenizer, bundle, (line) => say("loading", line));
  const { page } = bundle;
  const where = `${page.target} (${page.precision}) on WASM, ${ort.env.wasm.numThreads} threads`;
  say("ready", checksHashes() ? where : `${where}; hashes of files are not checked, because this is not https`);
  let stopped = false;
  $("stop").onclick = () => (stopped = true);
  $("run").onclick = async () => {
    stopped = false;
    say("running", "…");
    try {
      say("ready", await answer(pair, () => stopped));
    } catch (error) {
      say("ready", error.message);
    }
  };
}

main().catch((error) => say("failed", error.message));
