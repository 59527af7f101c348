// When to stop, and which text may be shown: every emitted token goes through here, drafted or not.

export class Stop {
  #ids;
  #left;
  #bytesOf;
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });

  /** null while the text goes on, then "stop" or "length". */
  reason = null;

  /** `ids`: tokens that end a text; `budget`: most tokens; `bytesOf`: token id -> bytes or null. */
  constructor(ids, budget, bytesOf) {
    [this.#ids, this.#left, this.#bytesOf] = [ids, budget, bytesOf];
  }

  /** Take the next token; gives the text that may be shown now. Half a character waits for its other half. */
  push(token) {
    this.#left -= 1;
    if (this.#ids.includes(token)) this.reason = "stop";
    else if (this.#left === 0) this.reason = "length";
    const bytes = this.reason === "stop" ? null : this.#bytesOf[token];
    return this.#decoder.decode(bytes ?? new Uint8Array(0), { stream: this.reason === null });
  }
}
