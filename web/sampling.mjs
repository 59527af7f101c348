// From logits to the target's law p, and the draw of a token from it: runtime/sampling.py, step by step.
// A law is a list of log-weights on its support. Logits are Float32Array, and every step in float32 stays one.

import { gumbel, keys, upper } from "./noise.mjs";

const NEAR = 12; // how far below the top, in log-weights, tokens are tried first

const GREEDY = { temperature: 0, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1, seed: 0 };

/** A whole sampler from some of its settings. Throws an Error for a value outside its range. */
export function sampling(settings = {}) {
  const s = { ...GREEDY, ...settings };
  const rules = [
    [s.temperature === 0 || (s.temperature >= 1e-4 && s.temperature <= 100), "temperature: 0, or 0.0001 to 100"],
    [Number.isInteger(s.top_k) && s.top_k >= 0, "top-k: 0 (off) or more"],
    [s.top_p > 0 && s.top_p <= 1, "top-p: above 0, at most 1"],
    [s.min_p >= 0 && s.min_p <= 1, "min-p: 0 to 1"],
    [s.repetition_penalty >= 0.01 && s.repetition_penalty <= 100, "repetition penalty: 0.01 to 100"],
    [typeof s.seed === "bigint" || Number.isSafeInteger(s.seed), "seed: a whole number; a BigInt from 2^53 on"],
    [s.seed >= 0 && s.seed < 2n ** 64n, "seed: 0 to 2^64 - 1"],
  ];
  for (const [holds, message] of rules) if (!holds) throw new Error(message);
  return s;
}

/** Index of the largest value, the lowest of several. */
export function argmax(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}

/** Repetition penalty on float32 logits, for the ids of the history. */
export function penalise(logits, history, penalty) {
  if (penalty === 1 || history.length === 0) return logits;
  const out = logits.slice();
  const by = Math.fround(penalty);
  for (const id of new Set(history)) out[id] = out[id] > 0 ? out[id] / by : out[id] * by;
  return out;
}

/** Which log-weights stay after top-k, top-p and min-p: ascending indices. Ties at a threshold: lowest index first. */
export function truncate(scores, { top_k, top_p, min_p }) {
  let keep = Array.from(scores.keys());
  if (top_k > 0 && top_k < scores.length) {
    const bound = scores.slice().sort()[scores.length - top_k];
    const above = keep.filter((i) => scores[i] > bound);
    const equal = keep.filter((i) => scores[i] === bound).slice(0, top_k - above.length);
    keep = [...above, ...equal].sort((a, b) => a - b);
  }
  if (top_p < 1) keep = nucleus(scores, keep, top_p);
  if (min_p > 0) {
    const bound = keep.reduce((top, i) => Math.max(top, scores[i]), -Infinity) + Math.log(min_p);
    keep = keep.filter((i) => scores[i] >= bound);
  }
  return keep;
}

/** The smallest set of the heaviest tokens whose mass reaches topP. */
function nucleus(scores, keep, topP) {
  const kept = scores.constructor.from(keep, (i) => scores[i]);
  const top = kept.reduce((a, b) => Math.max(a, b), -Infinity);
  const weights = Float64Array.from(kept.map((s) => s - top), Math.exp); // the difference keeps the type of the scores
  const needed = topP * weights.reduce((a, b) => a + b, 0);
  const heavy = (floor) => Array.from(weights.keys()).filter((i) => weights[i] >= floor);
  // Only the head has to be sorted; all of it in the rare case that it is too light.
  let head = heavy(1e-4);
  if (head.reduce((sum, i) => sum + weights[i], 0) < needed) head = heavy(0);
  head.sort((a, b) => weights[b] - weights[a] || a - b);
  let sum = 0;
  let count = 0;
  while (count < head.length && sum < needed) sum += weights[head[count++]];
  return head.slice(0, count).sort((a, b) => a - b).map((i) => keep[i]);
}

/** The target's token at an absolute position: argmax of log p + g. It never looks at the drafter. */
export function draw(logits, history, s, position) {
  const penalised = penalise(logits, history, s.repetition_penalty);
  if (s.temperature === 0) return argmax(penalised);
  const by = Math.fround(s.temperature);
  const scores = penalised.map((z) => z / by);
  if (s.top_k === 0 && s.top_p === 1 && s.min_p === 0) return drawFromAll(scores, s.seed, position);
  const ids = truncate(scores, s);
  return drawFrom(ids, ids.map((id) => scores[id]), s.seed, position);
}

/** argmax of log-weight + noise over a support: ids ascending, a log-weight for each. */
export function drawFrom(ids, scores, seed, position) {
  const key = keys(seed, position);
  return ids[argmax(ids.map((id, i) => scores[i] + gumbel(key, id)))];
}

/** The same over a whole vocabulary, with the noise evaluated only where it could win. */
function drawFromAll(scores, seed, position) {
  const key = keys(seed, position);
  const top = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  let best = -1;
  let value = -Infinity;
  const consider = (id) => {
    const noisy = scores[id] + gumbel(key, id);
    if (noisy > value || (noisy === value && id < best)) [best, value] = [id, noisy];
  };
  const far = [];
  scores.forEach((score, id) => (score > top - NEAR ? consider(id) : far.push(id)));
  // One further down needs noise above `needed`, and g <= -log(1 - u), so the quiet ids are ruled out.
  const needed = value - (top - NEAR);
  const lowest = Math.max(0, Math.floor((1 - Math.min(Math.exp(-needed), 1)) * 2 ** 32) - 1);
  for (const id of far) if (upper(key[0], id) >= lowest) consider(id);
  return best;
}
