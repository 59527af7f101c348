// The speculative loop: draft, verify in one target pass, emit, observe.

import { DraftContext } from "./context.mjs";
import { prefill } from "./decoder.mjs";
import { draft } from "./drafting.mjs";
import { draw } from "./sampling.mjs";
import { Stop } from "./stop.mjs";
import { verify } from "./verification.mjs";

const CHUNK = 64; // rows of a prefill pass

export class Generation {
  #pair;
  #prompt;
  #sampling;
  #length;
  #budget;
  #stop;
  #context = null;
  #tokens;

  /** What has happened so far. The prefill is a pass, and gives the first token. */
  counts = { proposed: 0, accepted: 0, merges: 0, passes: 0 };
  seconds = 0;
  firstTokenAt = null; // seconds

  /**
   * `pair`: see pair.mjs; `prompt`: {ids, prefix, text}, see prompt.mjs; `sampling`: see sampling.mjs.
   * `draftLength`: proposals of a round, 0 for plain decoding; `budget`: most tokens to emit.
   */
  constructor(pair, prompt, sampling, draftLength, budget) {
    [this.#pair, this.#prompt, this.#sampling] = [pair, prompt, sampling];
    [this.#length, this.#budget] = [draftLength, budget];
    this.#tokens = [...prompt.ids];
    this.#stop = new Stop(pair.target.info.stop_ids, budget, pair.target.tokens.bytesOf);
  }

  /** "stop" or "length"; null if it was cut short. */
  get finishReason() {
    return this.#stop.reason;
  }

  /** Tokens of the response so far. */
  get emitted() {
    return this.#tokens.slice(this.#prompt.ids.length);
  }

  /** The response as lists of {text, token, drafted}, one list for each target pass. */
  async *rounds() {
    let chunks = await this.#timed(() => this.#begin());
    this.firstTokenAt = this.seconds;
    for (;;) {
      yield chunks;
      if (this.#stop.reason !== null) return;
      chunks = await this.#timed(() => this.#round());
    }
  }

  async #timed(work) {
    const began = performance.now();
    const done = await work();
    this.seconds += (performance.now() - began) / 1000;
    return done;
  }

  async #begin() {
    const { target, drafter, leastRows } = this.#pair;
    target.decoder.rollback(0);
    const logits = await prefill(target.decoder, this.#tokens, CHUNK, leastRows);
    if (this.#length > 0) {
      const { prefix, text } = this.#prompt;
      this.#context = new DraftContext(drafter.decoder, drafter.tokens, drafter.info.context, prefix);
      if (text.length) this.#context.commit([text]);
      await this.#context.logits([]);
    }
    const y = draw(logits, this.#tokens, this.#sampling, this.#tokens.length);
    return this.#emit([], { tokens: [y], accepted: 0 });
  }

  async #round() {
    const { target, translation, leastRows } = this.#pair;
    const position = this.#tokens.length;
    // The bonus token takes one place of the budget.
    const limit = Math.min(this.#length, this.#budget - this.emitted.length - 1);
    const ends = target.info.stop_ids;
    const proposals =
      limit > 0 ? await draft(this.#context, translation, this.#sampling, position, limit, ends) : [];
    const proposed = proposals.map((proposal) => proposal.token);
    const rows = [this.#tokens.at(-1), ...proposed];
    while (rows.length < leastRows) rows.push(rows.at(-1)); // a pad row, forgotten after the pass
    const logits = await target.decoder.run(rows);
    return this.#emit(proposals, verify(logits, proposed, this.#tokens, this.#sampling, position));
  }

  /** Pass a round's tokens through the stop machine. What lies behind the stop never happened. */
  #emit(proposals, verdict) {
    const chunks = [];
    for (const token of verdict.tokens) {
      chunks.push({ text: this.#stop.push(token), token, drafted: chunks.length < verdict.accepted });
      if (this.#stop.reason !== null) break;
    }
    const emitted = chunks.map((chunk) => chunk.token);
    this.#tokens.push(...emitted);
    this.#pair.target.decoder.rollback(this.#tokens.length - 1);
    this.#count(this.#stop.reason === null ? proposals : proposals.slice(0, chunks.length), verdict, chunks.length);
    const spoken = emitted.map((token) => this.#pair.target.tokens.bytesOf[token]).filter((bytes) => bytes !== null);
    this.#context?.commit(spoken);
    return chunks;
  }

  #count(proposals, verdict, emitted) {
    this.counts.proposed += proposals.length;
    this.counts.accepted += Math.min(verdict.accepted, emitted);
    this.counts.merges += proposals.filter((proposal) => proposal.kind === "merge").length;
    this.counts.passes += 1;
  }
}
