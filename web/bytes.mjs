// Bytes and text. What is no UTF-8 stays bytes: a stray byte b travels in a string as the lone surrogate U+DC00 + b.

const encoder = new TextEncoder();
const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const STRAY = 0xdc00;

/** UTF-8 of a text. */
export const utf8 = (text) => encoder.encode(text);

/** The text of bytes, null if they are no UTF-8. */
export function textOf(bytes) {
  try {
    return strict.decode(bytes);
  } catch {
    return null;
  }
}

/** All of `parts` in a row. */
export function join(parts) {
  const out = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}

/** A string with one character per byte: what maps and comparisons use for bytes. */
export function keyOf(bytes) {
  let key = "";
  for (const byte of bytes) key += String.fromCharCode(byte);
  return key;
}

/** Characters of bytes, each as a string; a byte that belongs to none is a stray one. */
export function charactersOf(bytes) {
  const characters = [];
  for (let at = 0; at < bytes.length; ) {
    const lead = bytes[at];
    const size = lead < 0xc0 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    const character = at + size <= bytes.length ? textOf(bytes.subarray(at, at + size)) : null;
    characters.push(character ?? String.fromCharCode(STRAY + lead));
    at += character === null ? 1 : size;
  }
  return characters;
}

/** Whether a character is a stray byte. */
export const isStray = (character) => character >= "\udc80" && character <= "\udcff" && character.length === 1;

/** The bytes of characters, stray ones included. */
export function bytesOf(characters) {
  return join(characters.map((c) => (isStray(c) ? Uint8Array.of(c.charCodeAt(0) - STRAY) : utf8(c))));
}
