// From a user's message to token ids, for target and drafter, each by its own chat template.
// The templates were rendered when the package was made: page.json has what stands around the message.

import { utf8 } from "./bytes.mjs";

// What Python's strip() removes, which is what templates mean by trim.
const BLANK = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+";
const EDGES = new RegExp(`^${BLANK}|${BLANK}$`, "g");

const trimmed = (text) => text.replace(EDGES, "");

/** Special ids and text between them. `frame.parts`: an id, a text, or {before, after}: where the message goes. */
function fill(frame, message) {
  const inside = frame.trim ? trimmed(message) : message;
  return frame.parts
    .map((part) => (typeof part === "object" ? part.before + inside + part.after : part))
    .filter((part) => part !== "");
}

/**
 * A prompt for both models: `ids` for the target; for the drafter `prefix`, the ids of its own rendering, and `text`,
 * bytes that it reads as they stand. Throws an Error for an empty message, or one that does not fit.
 */
export function encodePrompt({ target, drafter, frames }, message, budget) {
  if (trimmed(message) === "") throw new Error("the prompt is empty; give some text");
  const chat = frames.target !== null;
  const begin = (info) => (info.bos === null ? [] : [info.bos]);
  const parts = chat ? fill(frames.target, message) : [message];
  const ids = [...(chat ? [] : begin(target.info)), ...encode(target, parts, "target")];
  checkRoom(ids, budget, target.info.context);
  if (chat && frames.drafter !== null) {
    return { ids, prefix: encode(drafter, fill(frames.drafter, message), "drafter"), text: new Uint8Array(0) };
  }
  // What stands before a text in the drafter's training: bos, or the end token of another document.
  const boundary = drafter.info.bos === null ? drafter.info.stop_ids.slice(0, 1) : begin(drafter.info);
  return { ids, prefix: boundary, text: utf8(chat ? `${message}\n\n` : message) };
}

function encode(model, parts, name) {
  const ids = model.tokens.encodePrompt(parts);
  if (ids.includes(null)) throw new Error(`the ${name} has no tokens for some character of the prompt; remove it`);
  return ids;
}

function checkRoom(ids, budget, context) {
  if (!(Number.isInteger(budget) && budget > 0)) throw new Error("most tokens: at least 1");
  const room = context - ids.length - 1; // one for a pad row
  if (room >= budget) return;
  const fix = room > 0 ? `set the most tokens to at most ${room}` : "shorten the prompt";
  throw new Error(`the prompt has ${ids.length} tokens and ${budget} new ones do not fit behind it; ${fix}`);
}
