// The drafter's context: the target's text in draft tokens, spelled as the drafter's own tokenizer would.
// runtime/context.py says why. It is what drafting takes for a model.

import { join } from "./bytes.mjs";

const LONGEST_TAIL = 96; // bytes that are spelled anew where no boundary is found (scripts without spaces)
const SPACE = 0x20;
const SPACES = [SPACE, 0x0a, 0x0d, 0x09];

export class DraftContext {
  #decoder;
  #tokens;
  #limit;
  #ids;
  #fed = [];
  #tailStart; // index in ids; everything before it is settled
  #tail = new Uint8Array(0);
  #rows = new Map();

  /** `prefix`: draft ids that are never respelled (the rendered prompt); `limit`: the drafter's positions. */
  constructor(decoder, tokens, limit, prefix) {
    [this.#decoder, this.#tokens, this.#limit] = [decoder, tokens, limit];
    decoder.rollback(0);
    this.#ids = prefix.length ? [...prefix] : [0];
    this.#tailStart = this.#ids.length;
    this.#slide();
  }

  /** The context in draft tokens (a copy). */
  get ids() {
    return [...this.#ids];
  }

  /** The longest path behind the context that the drafter's window holds. */
  get room() {
    return this.#limit - this.#ids.length;
  }

  /** Append the bytes of newly emitted target tokens; the rows of `logits` are void afterwards. */
  commit(pieces) {
    const tail = join([this.#tail, ...pieces]);
    const spelled = this.#tokens.encode(tail);
    if (spelled === null) return; // bytes that the drafter has no tokens for: it does not get to see them
    this.#tail = tail;
    this.#ids.length = this.#tailStart;
    this.#ids.push(...spelled);
    this.#rows.clear();
    this.#forgetRespelled();
    this.#settle(spelled);
    this.#slide();
  }

  /** Next-token logits behind the context and `path`; runs the drafter where it must. */
  async logits(path) {
    const key = path.join();
    if (!this.#rows.has(key)) {
      const wanted = [...this.#ids, ...path];
      // The last wanted token is always fed again, for its logits.
      const most = Math.min(this.#fed.length, wanted.length - 1);
      let keep = Math.min(this.#ids.length, most);
      while (keep < most && this.#fed[keep] === wanted[keep]) keep++;
      this.#decoder.rollback(keep);
      const rows = await this.#decoder.run(wanted.slice(keep));
      this.#fed = wanted;
      this.#rows.set(key, rows.at(-1).slice()); // the other rows may go
    }
    return this.#rows.get(key);
  }

  /** Drop fed tokens from the first one on that the tail now spells otherwise. */
  #forgetRespelled() {
    const end = Math.min(this.#fed.length, this.#ids.length);
    for (let i = this.#tailStart; i < end; i++) {
      if (this.#fed[i] === this.#ids[i]) continue;
      this.#fed.length = i;
      return;
    }
  }

  /** Move the tail to the last boundary: a space behind a non-space, at a border of draft tokens. */
  #settle(spelled) {
    const tail = this.#tail;
    const ends = [0];
    for (const id of spelled) ends.push(ends.at(-1) + this.#tokens.bytesOf[id].length);
    let bound = ends.length - 2;
    while (bound > 0 && !(tail[ends[bound]] === SPACE && !SPACES.includes(tail[ends[bound] - 1]))) bound--;
    if (bound <= 0) {
      bound = 0;
      const half = tail.length - LONGEST_TAIL / 2;
      if (tail.length > LONGEST_TAIL) bound = ends.findLastIndex((end) => end <= half);
    }
    this.#tail = tail.slice(ends[bound]);
    this.#tailStart += bound;
  }

  /** Keep the last half of the window once it is nearly full: drafts need room too. */
  #slide() {
    const room = Math.min(64, Math.floor(this.#limit / 4));
    if (this.#ids.length <= this.#limit - room) return;
    const drop = Math.min(this.#ids.length - Math.floor(this.#limit / 2), this.#tailStart);
    this.#ids.splice(0, drop);
    this.#tailStart -= drop;
    this.#fed = [];
    this.#decoder.rollback(0);
    this.#rows.clear();
  }
}
