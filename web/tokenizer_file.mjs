// What a tokenizer.json says about bytes: runtime/tokenizer_file.py, for files that export has checked.

import { keyOf, utf8 } from "./bytes.mjs";

export const SPACE = "▁";

/** Byte -> its character in byte-level BPE vocabularies (GPT-2's table). */
export const BYTE_ALPHABET = byteAlphabet();
const FROM_ALPHABET = new Map(BYTE_ALPHABET.map((character, byte) => [character, byte]));

function byteAlphabet() {
  const printable = (byte) => (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xff && byte !== 0xad);
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(printable(byte) ? byte : next++));
}

/** A normalizer or pre-tokenizer as a flat list of its steps. */
function steps(node, children) {
  if (!node) return [];
  if (node.type === "Sequence" && node[children]) return node[children].flatMap((child) => steps(child, children));
  return [node];
}

const normalizers = (document) => steps(document.normalizer, "normalizers");
const preTokenizers = (document) => steps(document.pre_tokenizer, "pretokenizers");

/** Whether vocabulary entries are written in the byte alphabet. */
export const isByteLevel = (document) => preTokenizers(document).some((step) => step.type === "ByteLevel");

/** Where the tokenizer puts a space of its own: "never", "first", "missing" or "always" (see the Python module). */
export function prefixSpace(document) {
  if (normalizers(document).some((step) => step.type === "Prepend")) return "always";
  for (const step of preTokenizers(document)) {
    if (step.prepend_scheme === "first") return "first";
    if (step.prepend_scheme === "always" || step.add_prefix_space === true) return "missing";
  }
  return "never";
}

/** The document less all that changes text, adds a space before it, or takes special tokens out of it. */
export function continuation(document) {
  const spaces = (step) => step.type === "Replace" && step.pattern?.String === " " && !isByteLevel(document);
  const keep = normalizers(document).filter(spaces);
  const before = preTokenizers(document).map((step) => {
    if (step.type === "ByteLevel") return { ...step, add_prefix_space: false };
    if (step.type !== "Metaspace") return step;
    const { add_prefix_space: _, ...rest } = step;
    return { ...rest, prepend_scheme: "never" };
  });
  return {
    version: "1.0",
    added_tokens: (document.added_tokens ?? []).filter((token) => !token.special),
    normalizer: keep.length ? { type: "Sequence", normalizers: keep } : null,
    pre_tokenizer: before.length ? { type: "Sequence", pretokenizers: before } : null,
    post_processor: null,
    decoder: null,
    model: document.model,
  };
}

/** Token id -> its bytes (Uint8Array); null for special tokens and unused ids. */
export function readBytes(document) {
  const byteLevel = isByteLevel(document);
  const added = new Map((document.added_tokens ?? []).map((token) => [token.content, token]));
  const ids = new Map(Object.entries(document.model.vocab));
  for (const token of added.values()) ids.set(token.content, token.id);
  const bytes = new Array([...ids.values()].reduce((a, b) => Math.max(a, b), 0) + 1).fill(null);
  for (const [content, id] of ids) {
    if (added.get(content)?.special || content === document.model.unk_token) continue;
    const piece = byteLevel && !added.has(content) ? fromAlphabet(content) : plainPiece(content, byteLevel);
    bytes[id] = piece?.length ? piece : null;
  }
  return bytes;
}

function plainPiece(content, byteLevel) {
  if (byteLevel) return utf8(content);
  const byte = /^<0x([0-9A-Fa-f]{2})>$/.exec(content);
  return byte ? Uint8Array.of(parseInt(byte[1], 16)) : utf8(content.replaceAll(SPACE, " "));
}

function fromAlphabet(content) {
  const found = Array.from(content, (character) => FROM_ALPHABET.get(character));
  return found.includes(undefined) ? null : Uint8Array.from(found);
}

/** Bytes (as a key) -> id; a piece goes before an added token and before a byte token of the same bytes. */
export function idsByBytes(document, bytes, nameOf) {
  const byteLevel = isByteLevel(document);
  const added = new Set((document.added_tokens ?? []).filter((token) => !token.special).map((token) => token.id));
  const ordinary = new Map();
  const late = new Map();
  bytes.forEach((piece, id) => {
    if (piece === null) return;
    const isByte = !byteLevel && piece.length === 1 && (nameOf(id) ?? "").startsWith("<0x");
    const table = isByte || added.has(id) ? late : ordinary;
    if (!table.has(keyOf(piece))) table.set(keyOf(piece), id);
  });
  return new Map([...late, ...ordinary]);
}
