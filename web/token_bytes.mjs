// Token ids as the exact bytes they stand for, and bytes as the ids a model's own tokenizer gives them:
// runtime/token_bytes.py on @huggingface/tokenizers.

import { bytesOf, charactersOf, isStray, join, keyOf, textOf, utf8 } from "./bytes.mjs";
import * as file from "./tokenizer_file.mjs";

const SPELL_LIMIT = 32; // longest piece tried when text is spelled by bytes alone: keeps that search linear

export class TokenBytes {
  #tokenizer;
  #byteLevel;
  #idOf;

  /** `Tokenizer`: the class of @huggingface/tokenizers; `document`: tokenizer.json; `vocabulary`: rows of the model. */
  constructor(Tokenizer, document, vocabulary) {
    this.#tokenizer = new Tokenizer(file.continuation(document), {});
    this.#byteLevel = file.isByteLevel(document);
    this.prefixSpace = file.prefixSpace(document);
    const bytes = file.readBytes(document);
    this.#idOf = file.idsByBytes(document, bytes, (id) => this.#tokenizer.id_to_token(id));
    const rows = vocabulary ?? bytes.length;
    /** Token id -> bytes, null for special tokens and unused ids. */
    this.bytesOf = Array.from({ length: rows }, (_, id) => bytes[id] ?? null);
  }

  /** Ids of a prompt given as special ids and the text between them, with the spaces the tokenizer adds. null: `encode`. */
  encodePrompt(parts) {
    return parts.flatMap((part, number) => {
      if (typeof part === "number") return [part];
      const spaced = part.startsWith(" ");
      const wanted = { never: false, first: number === 0 && !spaced, missing: !spaced, always: true }[this.prefixSpace];
      return this.encode(utf8(wanted && part ? ` ${part}` : part));
    });
  }

  /** The ids the model's own tokenizer gives `bytes` as a continuation of other text; null if it has none for them. */
  encode(bytes) {
    const text = textOf(bytes);
    if (text !== null) {
      const ids = this.#idsOf(text);
      if (this.#spells(ids, bytes)) return ids;
    }
    return this.#encodeBytes(bytes);
  }

  #idsOf(text) {
    return text === "" ? [] : this.#tokenizer.encode(text, { add_special_tokens: false }).ids;
  }

  #spells(ids, bytes) {
    const pieces = ids.map((id) => this.bytesOf[id] ?? null);
    return !pieces.includes(null) && keyOf(join(pieces)) === keyOf(bytes);
  }

  /** Ids for bytes that no string stands for, or that the tokenizer would change. */
  #encodeBytes(bytes) {
    const whole = this.#idOf.get(keyOf(bytes));
    if (whole !== undefined) return [whole];
    const ids = [];
    for (const part of this.#parts(bytes)) {
      const found = this.#encodePart(part);
      const spelled = this.#spells(found, part) ? found : this.#spell(part);
      if (spelled === null) return null;
      ids.push(...spelled);
    }
    return ids;
  }

  /** `bytes` cut where the tokenizer's merges cannot reach across. */
  #parts(bytes) {
    const characters = charactersOf(bytes);
    const cuts = this.#byteLevel ? this.#wordStarts(characters) : runStarts(characters);
    return cuts.map((start, i) => bytesOf(characters.slice(start, cuts[i + 1]))).filter((part) => part.length);
  }

  /** Where words begin, as indices of characters; stray bytes count as characters of the class they likely have. */
  #wordStarts(characters) {
    const standing = standIns(characters);
    const begins = new Map(); // byte of the text with stand-ins -> index of the character that begins there
    let byte = 0;
    standing.forEach((c, i) => {
      begins.set(byte, i);
      byte += utf8(c).length;
    });
    const starts = new Set([0]);
    byte = 0;
    for (const word of this.#tokenizer.pre_tokenizer(standing.join(""))) {
      if (begins.has(byte)) starts.add(begins.get(byte));
      byte += word.length; // one character of the alphabet for each byte
    }
    return [...starts];
  }

  #encodePart(part) {
    if (this.#byteLevel) {
      const word = Array.from(part, (byte) => file.BYTE_ALPHABET[byte]).join("");
      return this.#tokenizer.model([word]).map((token) => this.#tokenizer.token_to_id(token));
    }
    const text = textOf(part);
    return text === null ? [] : this.#idsOf(text);
  }

  /** The fewest tokens whose bytes joined are `bytes`, null if there are none. */
  #spell(bytes) {
    const key = keyOf(bytes);
    const fewest = [0, ...new Array(key.length).fill(key.length + 1)];
    const last = new Array(key.length + 1).fill(0);
    for (let end = 1; end <= key.length; end++) {
      for (let start = Math.max(0, end - SPELL_LIMIT); start < end; start++) {
        if (fewest[start] + 1 < fewest[end] && this.#idOf.has(key.slice(start, end))) {
          fewest[end] = fewest[start] + 1;
          last[end] = start;
        }
      }
    }
    if (fewest[key.length] > key.length) return null;
    const ids = [];
    for (let end = key.length; end > 0; end = last[end]) ids.unshift(this.#idOf.get(key.slice(last[end], end)));
    return ids;
  }
}

/** Where runs of stray bytes and of SPACE begin and end; a SPACE in the text is not the space inside the vocabulary. */
function runStarts(characters) {
  const odd = characters.map((c) => isStray(c) || c === file.SPACE);
  return odd.flatMap((is, i) => (i === 0 || is !== odd[i - 1] ? [i] : []));
}

/** Every run of stray bytes as characters of the class (letter or symbol) that its whole character likely has. */
function standIns(characters) {
  let letter = false;
  return characters.map((c, i) => {
    if (!isStray(c)) return c;
    const lead = c.charCodeAt(0) - 0xdc00;
    if (i === 0 || !isStray(characters[i - 1])) letter = lead >= 0xc3 && lead <= 0xed && lead !== 0xe2;
    return letter ? "一" : "\ufffd";
  });
}
