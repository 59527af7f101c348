// One round's proposals by the coupled draw: q̂ over target ids, and x from it. runtime/drafting.py says why.
// The drafter is anything with `room` (longest path that fits its window) and `await logits(path)` (Float32Array).

import { drawFrom, truncate } from "./sampling.mjs";

// Draft tokens lighter than 1e-3 of the heaviest, or beyond the 32 heaviest, are left out: any q̂ is lossless.
const LOG_FLOOR = Math.log(1e-3);
const WIDEST = 32;
const DEEPEST = 16; // draft tokens of one merge

/** The likeliest draft tokens of one row of logits: [q, draft id], heaviest first; q sums to 1. */
function likeliest(logits, temperature) {
  const t = temperature || 1;
  const top = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const floor = Math.fround(top + LOG_FLOOR * t);
  let ids = [];
  for (let id = 0; id < logits.length; id++) if (logits[id] > floor) ids.push(id);
  if (ids.length > WIDEST) ids = ids.sort((a, b) => logits[b] - logits[a] || a - b).slice(0, WIDEST);
  const weights = ids.map((id) => Math.exp((logits[id] - top) / t));
  const total = weights.reduce((a, b) => a + b, 0);
  return ids.map((id, i) => [weights[i] / total, id]).sort((a, b) => b[0] - a[0] || a[1] - b[1]);
}

/**
 * q̂ behind `path`, where the draft ids `banned` cannot come next:
 * `masses`: target id -> unnormalised mass; `spelling`: target id -> the likeliest draft tokens that lead to it;
 * `head`: the likeliest draft token; `children`: draft ids that merge with it.
 */
async function lawBehind(model, translation, path, temperature, banned) {
  let logits = await model.logits(path);
  if (banned.length) {
    logits = logits.slice();
    for (const id of banned) logits[id] = -Infinity;
  }
  const row = likeliest(logits, temperature);
  const [most, head] = row[0];
  const masses = new Map();
  const spelling = new Map();
  for (const [q, d] of row) {
    const [first] = translation.pieces[d];
    if (first === undefined) continue;
    masses.set(first, (masses.get(first) ?? 0) + q);
    if (!spelling.has(first)) spelling.set(first, [d]);
  }
  const law = { masses, spelling, head, children: [] };
  await addMerges(law, model, translation, path, temperature, most);
  return law;
}

/** Give merges along the greedy path their mass, and take it from the longest complete token before each. */
async function addMerges(law, model, translation, path, temperature, most) {
  const { masses, spelling } = law;
  let owner = translation.pieces[law.head].slice(0, 1);
  let prefix = [law.head];
  let node = translation.root.children.get(law.head);
  let weight = most;
  const deepest = Math.min(DEEPEST, model.room - path.length + 1);
  while (node && node.children.size && prefix.length < deepest) {
    const after = likeliest(await model.logits([...path, ...prefix]), temperature);
    let found = 0;
    for (const [q, d] of after) {
      const child = node.children.get(d);
      if (!child || child.target < 0) continue;
      const mass = weight * q;
      const before = masses.get(child.target) ?? 0;
      if (mass > before) spelling.set(child.target, [...prefix, d]);
      masses.set(child.target, before + mass);
      found += mass;
      if (prefix.length === 1) law.children.push(d);
    }
    for (const token of owner) masses.set(token, Math.max(masses.get(token) - found, 0));
    const [q, next] = after[0];
    node = node.children.get(next);
    if (node && node.target >= 0) owner = [node.target];
    prefix = [...prefix, next];
    weight *= q;
  }
}

/** The drawn x = argmax of log q̂ + g, with the truncation that p gets; -1 if nothing is mapped. */
function choose(law, s, position) {
  const pairs = [...law.masses].sort((a, b) => a[0] - b[0]);
  if (s.temperature === 0) return pairs.reduce((best, pair) => (pair[1] > best[1] ? pair : best), [-1, -Infinity])[0];
  const positive = pairs.filter(([, mass]) => mass > 0);
  if (!positive.length) return -1;
  const scores = Float64Array.from(positive, ([, mass]) => Math.log(mass));
  const keep = truncate(scores, s);
  return drawFrom(keep.map((i) => positive[i][0]), keep.map((i) => scores[i]), s.seed, position);
}

/** What a drawn target token proposes: itself, and the further pieces if it is the first of a split. */
function proposalsOf(law, translation, token) {
  const spelled = law.spelling.get(token);
  if (spelled.length > 1) return [{ token, kind: "merge", path: spelled }];
  const pieces = translation.pieces[spelled[0]];
  const kind = translation.kind(spelled[0]);
  return pieces.map((piece, i) => ({ token: piece, kind, path: i === pieces.length - 1 ? spelled : [] }));
}

/**
 * Up to `limit` proposals {token, kind, path} for the absolute positions from `position` on.
 * Stops early after a token of `ends`, at the end of the model's window, and where nothing can be translated.
 */
export async function draft(model, translation, s, position, limit, ends) {
  const proposals = [];
  let path = [];
  let banned = [];
  while (proposals.length < limit && path.length <= model.room) {
    const law = await lawBehind(model, translation, path, s.temperature, banned);
    const token = choose(law, s, position + proposals.length);
    if (token < 0) break;
    const spelled = law.spelling.get(token);
    proposals.push(...proposalsOf(law, translation, token).slice(0, limit - proposals.length));
    // A head that was proposed alone was not merged, so what would have merged cannot follow.
    banned = spelled.length === 1 && spelled[0] === law.head ? law.children : [];
    if (ends.includes(proposals.at(-1).token)) break;
    path = [...path, ...spelled];
  }
  return proposals;
}
